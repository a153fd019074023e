// Collectives of threads against a plain computation, through every route.
#include <cstdlib>
#include <cstring>
#include <random>

#include "check.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/exact_sum.h"
#include "collectives/exchange.h"
#include "failure.h"

using namespace lockstep;

namespace {

// Small pieces, so that small messages take the long paths.
struct SmallPieces {
  SmallPieces() {
    setenv("LOCKSTEP_SLOT_BYTES", "1024", 1);
    setenv("LOCKSTEP_STAGE_BYTES", "2048", 1);
    setenv("LOCKSTEP_CELL_BYTES", "256", 1);
    setenv("LOCKSTEP_LANE_BYTES", "512", 1);
  }
  ~SmallPieces() {
    for (const char* name : {"LOCKSTEP_SLOT_BYTES", "LOCKSTEP_STAGE_BYTES", "LOCKSTEP_CELL_BYTES",
                             "LOCKSTEP_LANE_BYTES"})
      unsetenv(name);
  }
};

std::vector<float> values(int rank, size_t count, int salt) {
  std::mt19937 random(static_cast<unsigned>(rank * 7919 + salt));
  std::uniform_real_distribution<float> between(-1, 1);
  std::vector<float> result(count);
  for (float& value : result) value = between(random);
  return result;
}

// The sum along the tree, by recursion: what the fold must equal bit for bit.
float tree(const std::vector<std::vector<float>>& inputs, size_t i, int lo, int hi) {
  if (hi - lo == 1) return inputs[static_cast<size_t>(lo)][i];
  int width = 1;
  while (2 * width < hi - lo) width *= 2;
  return tree(inputs, i, lo, lo + width) + tree(inputs, i, lo + width, hi);
}

Call call_of(Op op, size_t count, int root = -1) {
  Call call;
  call.op = op;
  call.count = count;
  call.root = root;
  return call;
}

// A tensor in private memory, or in the heap.
struct Buffer {
  float* data;
  bool shared;
  Buffer(const std::vector<float>& from, bool in_heap) : shared(in_heap) {
    const size_t bytes = std::max<size_t>(from.size() * sizeof(float), 1);
    data = static_cast<float*>(shared ? Heap::here().allocate(bytes) : std::malloc(bytes));
    if (!from.empty()) std::memcpy(data, from.data(), from.size() * sizeof(float));
  }
  ~Buffer() { shared ? Heap::here().free(data) : std::free(data); }
};

void check_all_reduce(int n, bool (*in_heap)(int rank)) {
  on_ranks(n, [&](Group& group) {
    int salt = 0;
    for (size_t count : {0, 1, 15, 16, 17, 255, 256, 257, 511, 1000, 4099, 20011}) {
      std::vector<std::vector<float>> inputs;
      ++salt;
      for (int rank = 0; rank < n; ++rank) inputs.push_back(values(rank, count, salt));
      Buffer buffer(inputs[static_cast<size_t>(group.rank())], in_heap(group.rank()));
      {
        Turn turn(group, call_of(Op::all_reduce, count), kPatience, false);
        all_reduce(turn, buffer.data, count, Type::f32, Reduction::sum);
      }
      for (size_t i = 0; i < count; ++i) CHECK(buffer.data[i] == tree(inputs, i, 0, n));
    }
  });
}

}  // namespace

TEST(all_reduce_adds_along_the_tree_privately) {
  SmallPieces small;
  for (int n : {1, 2, 3, 4, 7}) check_all_reduce(n, [](int) { return false; });
}

TEST(all_reduce_adds_along_the_tree_in_segments) {
  SmallPieces small;
  for (int n : {1, 2, 3, 5}) check_all_reduce(n, [](int) { return true; });
}

TEST(all_reduce_mixes_private_and_shared) {
  SmallPieces small;
  for (int n : {2, 3, 4}) check_all_reduce(n, [](int rank) { return rank % 2 == 1; });
}

TEST(reduce_leaves_other_tensors_alone) {
  SmallPieces small;
  on_ranks(3, [](Group& group) {
    for (bool shared : {false, true})
      for (size_t count : {10, 3000}) {
        std::vector<std::vector<float>> inputs;
        for (int rank = 0; rank < 3; ++rank) inputs.push_back(values(rank, count, 5));
        Buffer buffer(inputs[static_cast<size_t>(group.rank())], shared);
        {
          Turn turn(group, call_of(Op::reduce, count, 1), kPatience, false);
          all_reduce(turn, buffer.data, count, Type::f32, Reduction::sum, 1);
        }
        for (size_t i = 0; i < count; ++i)
          CHECK(buffer.data[i] == (group.rank() == 1
                                       ? tree(inputs, i, 0, 3)
                                       : inputs[static_cast<size_t>(group.rank())][i]));
      }
  });
}

TEST(exchange_brings_unequal_blocks_to_everybody) {
  SmallPieces small;
  for (int n : {1, 2, 3, 4})
    on_ranks(n, [n](Group& group) {
      // Rank s sends s * 300 + d * 17 floats to d, some of them none.
      const auto length = [](int s, int d) { return static_cast<size_t>(s * 300 + d * 17); };
      for (bool shared : {false, true}) {
        std::vector<std::unique_ptr<Buffer>> send, receive;
        Exchange blocks;
        for (int r = 0; r < n; ++r) {
          send.push_back(std::make_unique<Buffer>(
              values(group.rank() * n + r, length(group.rank(), r), 3), shared));
          receive.push_back(std::make_unique<Buffer>(
              std::vector<float>(length(r, group.rank()), 7.f), false));
          blocks.send.push_back({reinterpret_cast<char*>(send.back()->data),
                                 length(group.rank(), r) * sizeof(float)});
          blocks.receive.push_back({reinterpret_cast<char*>(receive.back()->data),
                                    length(r, group.rank()) * sizeof(float)});
        }
        Call call = call_of(Op::all_to_all, 0);
        call.uneven = 1;
        for (int again = 0; again < 5; ++again) {
          Turn turn(group, call, kPatience, false);
          exchange(turn, blocks);
        }
        for (int s = 0; s < n; ++s) {
          const auto expected = values(s * n + group.rank(), length(s, group.rank()), 3);
          CHECK(expected.empty() || std::memcmp(expected.data(), receive[static_cast<size_t>(s)]->data,
                            expected.size() * sizeof(float)) == 0);
        }
      }
    });
}

TEST(reduce_scatter_adds_along_the_tree) {
  SmallPieces small;
  for (int n : {1, 2, 3, 4})
    on_ranks(n, [n](Group& group) {
      for (bool shared : {false, true})
        for (size_t count : {0, 3, 100, 999, 5000}) {
          std::vector<std::vector<float>> all;  // of every rank, n blocks of `count`
          for (int rank = 0; rank < n; ++rank)
            all.push_back(values(rank, count * static_cast<size_t>(n), 11));
          Buffer input(all[static_cast<size_t>(group.rank())], shared);
          std::vector<float> result(count);
          std::vector<Block> send;
          for (int d = 0; d < n; ++d)
            send.push_back({reinterpret_cast<char*>(input.data + static_cast<size_t>(d) * count),
                            count * sizeof(float)});
          Turn turn(group, call_of(Op::reduce_scatter, count), kPatience, false);
          reduce_scatter(turn, send, reinterpret_cast<char*>(result.data()), count, Type::f32,
                         Reduction::sum);
          for (size_t i = 0; i < count; ++i)
            CHECK(result[i] == tree(all, i + static_cast<size_t>(group.rank()) * count, 0, n));
        }
    });
}

TEST(exact_sum_leaves_absent_members_out) {
  on_ranks(3, [](Group& group) {
    // 8 leaves on 3 ranks; member 0 is absent in leaf 2, member 1 everywhere but in node 67.
    ExactBucket bucket;
    bucket.length = 96;
    bucket.members = {{0, 30}, {32, 64}};
    bucket.holders = {{{0, 2}, {2, 3}}, {{3, 4}, {4, 6}}, {{6, 8}}};
    bucket.leaves = 8;
    const auto& held = bucket.holders[static_cast<size_t>(group.rank())];
    const auto value = [](std::pair<int, int> node) { return -0.0f - static_cast<float>(node.first == 6); };
    char* packed = static_cast<char*>(Heap::here().allocate(packed_bytes(bucket, group.rank())));
    auto* result = static_cast<float*>(Heap::here().allocate(bucket.length * sizeof(float)));
    for (size_t i = 0; i < held.size(); ++i) {
      auto* node = reinterpret_cast<float*>(packed) + i * bucket.length;
      std::fill(node, node + bucket.length, value(held[i]));
      char* flags = packed + held.size() * bucket.length * sizeof(float) + i * 2;
      flags[0] = held[i].first != 2;
      flags[1] = held[i].first == 6;
      if (!flags[0]) std::fill(node, node + 32, 1e30f);       // must not be looked at
      if (!flags[1]) std::fill(node + 32, node + 96, 1e30f);
    }
    std::vector<bool> present;
    {
      Turn turn(group, call_of(Op::exact_sum, bucket.length), kPatience, false);
      present = exact_sum(turn, bucket, packed, reinterpret_cast<char*>(result));
    }
    CHECK(present[0] && present[1]);
    for (size_t i = 0; i < 30; ++i) CHECK(result[i] == -1.0f);
    for (size_t i = 32; i < 96; ++i) CHECK(result[i] == -1.0f);
    { Turn turn(group, call_of(Op::barrier, 0), kPatience, false); barrier(turn); }
    Heap::here().free(packed);
    Heap::here().free(result);
  });
}

TEST(ranks_that_disagree_all_learn_both_sides) {
  on_ranks(3, [](Group& group) {
    std::vector<float> data(100, 1.f);
    const size_t count = group.rank() == 1 ? 99 : 100;
    const std::string text = failure([&] {
      Turn turn(group, call_of(Op::all_reduce, count), kPatience, false);
      all_reduce(turn, data.data(), count, Type::f32, Reduction::sum);
    });
    CHECK(contains(text, "ranks 0, 2 called all_reduce(SUM, dtype 0, 100 elements)"));
    CHECK(contains(text, "rank 1 called all_reduce(SUM, dtype 0, 99 elements)"));
    // The group goes on.
    Turn turn(group, call_of(Op::barrier, 0), kPatience, false);
    barrier(turn);
  });
}

TEST(unequal_tables_are_a_disagreement) {
  on_ranks(2, [](Group& group) {
    std::vector<char> data(1000);
    Exchange blocks;
    blocks.send = {{data.data(), 8}, {data.data(), 8}};
    blocks.receive = {{data.data() + 500, 8}, {data.data() + 600, group.rank() == 0 ? 9u : 8u}};
    Call call = call_of(Op::all_to_all, 0);
    call.uneven = 1;
    const std::string text = failure([&] {
      Turn turn(group, call, kPatience, false);
      exchange(turn, blocks);
    });
    CHECK(contains(text, "disagree"));
  });
}

TEST(kernels_give_the_same_bits_on_every_processor) {
  const Kernels& plain = *kernels_named("plain");
  std::vector<uint16_t> halves(1 << 16), back(1 << 16);
  std::vector<float> wide(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const char* name : {"plain", "avx2", "avx512"}) {
    const Kernels* kernels = kernels_named(name);
    if (!kernels) continue;
    for (int kind : {0, 1}) {
      kernels->widen[kind](wide.data(), halves.data(), halves.size());
      kernels->narrow[kind](back.data(), wide.data(), wide.size());
      for (size_t i = 0; i < halves.size(); ++i)
        if (wide[i] == wide[i]) CHECK(back[i] == halves[i]);
        else CHECK((back[i] & 0x7fff) > (kind ? 0x7f80 : 0x7c00));
    }
    const auto a = values(1, 1003, 1), b = values(2, 1003, 2);
    for (int r = 0; r < 5; ++r) {
      std::vector<float> x(1003), y(1003);
      plain.combine[r][1](x.data(), a.data(), b.data(), 1003);
      kernels->combine[r][1](y.data(), a.data(), b.data(), 1003);
      CHECK(std::memcmp(x.data(), y.data(), 1003 * sizeof(float)) == 0);
    }
  }
}

TEST(narrowing_rounds_to_nearest_even) {
  const Kernels& k = kernels();
  const float inputs[] = {1.0f + 1.0f / 2048, 1.0f + 3.0f / 2048, 65519.9f, 65520.0f, 1e-8f, 5.9604645e-8f, 2.9802322e-8f, 2.98023259e-8f};
  const uint16_t expected[] = {0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0000, 0x0001, 0x0000, 0x0001};
  uint16_t out[8];
  k.narrow[0](out, inputs, 8);
  for (int i = 0; i < 8; ++i) CHECK(out[i] == expected[i]);
}

TEST(tree_shape_depends_on_the_leaves_alone) {
  CHECK((tree_steps(3) == std::vector<int>{0, 1, kCombine, 2, kCombine}));
  CHECK((tree_steps(5) == std::vector<int>{0, 1, kCombine, 2, 3, kCombine, kCombine, 4, kCombine}));
  CHECK((tree_steps({{6, 8}, {0, 4}, {4, 6}}, 8) == std::vector<int>{1, 2, 0, kCombine, kCombine}));
  CHECK((tree_steps({{0, 1}, {1, 2}}, 2, {false, true}) == std::vector<int>{1}));
  CHECK(!failure([] { tree_steps({{0, 1}}, 2); }).empty());
}
