// Collectives between threads, compared with a plain computation, on every route.
#include <cstdlib>
#include <cstring>
#include <random>

#include "check.h"
#include "collectives/all_gather_bytes.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/exchange.h"
#include "collectives/reduce_scatter.h"
#include "collectives/reproducible_all_reduce.h"
#include "collectives/share.h"
#include "errors.h"
#include "ranks.h"

using namespace lockstep;

namespace {

// Small buffers, so that small messages take the long paths.
struct SmallPieces {
  SmallPieces() {
    setenv("LOCKSTEP_SLOT_BYTES", "1024", 1);
    setenv("LOCKSTEP_STAGING_BYTES", "2048", 1);
    setenv("LOCKSTEP_CELL_BYTES", "256", 1);
    setenv("LOCKSTEP_BOUNCE_BYTES", "512", 1);
    setenv("LOCKSTEP_CACHE_BYTES", "8192", 1);
  }
  ~SmallPieces() {
    for (const char* name : {"LOCKSTEP_SLOT_BYTES", "LOCKSTEP_STAGING_BYTES", "LOCKSTEP_CELL_BYTES",
                             "LOCKSTEP_BOUNCE_BYTES", "LOCKSTEP_CACHE_BYTES"})
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

// The sum along the tree, computed recursively: the reference for bitwise comparison.
float tree(const std::vector<std::vector<float>>& inputs, size_t i, int lo, int hi) {
  if (hi - lo == 1) return inputs[static_cast<size_t>(lo)][i];
  int width = 1;
  while (2 * width < hi - lo) width *= 2;
  return tree(inputs, i, lo, lo + width) + tree(inputs, i, lo + width, hi);
}

CallInfo make_call_info(Op op, size_t count, int root = -1) {
  CallInfo info;
  info.op = op;
  info.count = count;
  info.root = root;
  return info;
}

// A tensor in private memory, or in the heap.
struct Buffer {
  float* data;
  bool shared;
  Buffer(const std::vector<float>& from, bool in_heap) : shared(in_heap) {
    const size_t bytes = std::max<size_t>(from.size() * sizeof(float), 1);
    data = static_cast<float*>(shared ? Heap::instance().allocate(bytes) : std::malloc(bytes));
    if (!from.empty()) std::memcpy(data, from.data(), from.size() * sizeof(float));
  }
  ~Buffer() { shared ? Heap::instance().free(data) : std::free(data); }
};

void check_all_reduce(int n, bool (*in_heap)(int rank)) {
  on_ranks(n, [&](Group& group) {
    int salt = 0;
    for (size_t count : {0, 1, 15, 16, 17, 255, 256, 257, 511, 1000, 4099, 20011}) {
      std::vector<std::vector<float>> inputs;
      ++salt;
      for (int rank = 0; rank < n; ++rank) inputs.push_back(values(rank, count, salt));
      // With both kinds of stores.
      for (uint32_t repeat = 0; repeat < 2 * AutoTuner::kTrialCalls; ++repeat) {
        Buffer buffer(inputs[static_cast<size_t>(group.rank())], in_heap(group.rank()));
        {
          CollectiveCall call(group, make_call_info(Op::all_reduce, count), kTestTimeout, false);
          all_reduce(call, buffer.data, count, DataType::f32, Reduction::sum);
        }
        for (size_t i = 0; i < count; ++i) CHECK(buffer.data[i] == tree(inputs, i, 0, n));
      }
    }
  });
}

}  // namespace

TEST(all_reduce_of_private_tensors_adds_along_the_tree) {
  SmallPieces small;
  for (int n : {1, 2, 3, 4, 7}) check_all_reduce(n, [](int) { return false; });
}

TEST(all_reduce_of_shared_tensors_adds_along_the_tree) {
  SmallPieces small;
  for (int n : {1, 2, 3, 5}) check_all_reduce(n, [](int) { return true; });
}

TEST(all_reduce_mixes_private_and_shared_tensors) {
  SmallPieces small;
  for (int n : {2, 3, 4}) check_all_reduce(n, [](int rank) { return rank % 2 == 1; });
}

TEST(reduce_does_not_change_other_tensors) {
  SmallPieces small;
  on_ranks(3, [](Group& group) {
    for (bool shared : {false, true})
      for (size_t count : {10, 3000}) {
        std::vector<std::vector<float>> inputs;
        for (int rank = 0; rank < 3; ++rank) inputs.push_back(values(rank, count, 5));
        Buffer buffer(inputs[static_cast<size_t>(group.rank())], shared);
        {
          CollectiveCall call(group, make_call_info(Op::reduce, count, 1), kTestTimeout, false);
          all_reduce(call, buffer.data, count, DataType::f32, Reduction::sum, 1);
        }
        for (size_t i = 0; i < count; ++i)
          CHECK(buffer.data[i] == (group.rank() == 1
                                       ? tree(inputs, i, 0, 3)
                                       : inputs[static_cast<size_t>(group.rank())][i]));
      }
  });
}

TEST(exchange_delivers_blocks_of_unequal_sizes) {
  SmallPieces small;
  for (int n : {1, 2, 3, 4})
    on_ranks(n, [n](Group& group) {
      // Rank s sends s * 300 + d * 17 floats to rank d; the first block is empty.
      const auto length = [](int s, int d) {
        return size_t{300} * static_cast<size_t>(s) + size_t{17} * static_cast<size_t>(d);
      };
      for (bool shared : {false, true}) {
        std::vector<std::unique_ptr<Buffer>> send, receive;
        ExchangeBlocks blocks;
        for (int r = 0; r < n; ++r) {
          send.push_back(std::make_unique<Buffer>(
              values(group.rank() * n + r, length(group.rank(), r), 3), shared));
          receive.push_back(
              std::make_unique<Buffer>(std::vector<float>(length(r, group.rank()), 7.f), false));
          blocks.send.push_back({reinterpret_cast<char*>(send.back()->data),
                                 length(group.rank(), r) * sizeof(float)});
          blocks.receive.push_back({reinterpret_cast<char*>(receive.back()->data),
                                    length(r, group.rank()) * sizeof(float)});
        }
        CallInfo info = make_call_info(Op::all_to_all, 0);
        info.uneven = 1;
        // With both kinds of stores.
        for (uint32_t again = 0; again < 2 * AutoTuner::kTrialCalls + 1; ++again) {
          for (const Block& block : blocks.receive)
            if (block.bytes) std::memset(block.data, 7, block.bytes);
          {
            CollectiveCall call(group, info, kTestTimeout, false);
            exchange(call, blocks);
          }
          for (int s = 0; s < n; ++s) {
            const auto expected = values(s * n + group.rank(), length(s, group.rank()), 3);
            CHECK(expected.empty() ||
                  std::memcmp(expected.data(), receive[static_cast<size_t>(s)]->data,
                              expected.size() * sizeof(float)) == 0);
          }
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
          // With both kinds of stores.
          for (uint32_t repeat = 0; repeat < 2 * AutoTuner::kTrialCalls; ++repeat) {
            std::fill(result.begin(), result.end(), 7.0f);
            {
              CollectiveCall call(group, make_call_info(Op::reduce_scatter, count), kTestTimeout,
                                  false);
              reduce_scatter(call, send, reinterpret_cast<char*>(result.data()), count,
                             DataType::f32, Reduction::sum);
            }
            for (size_t i = 0; i < count; ++i)
              CHECK(result[i] == tree(all, i + static_cast<size_t>(group.rank()) * count, 0, n));
          }
        }
    });
}

TEST(reduce_scatter_accepts_empty_outputs) {
  SmallPieces small;
  constexpr size_t kCounts[] = {700, 0, 3};
  on_ranks(3, [&](Group& group) {
    const auto me = static_cast<size_t>(group.rank());
    for (bool shared : {true, false}) {
      std::vector<std::unique_ptr<Buffer>> parts;
      std::vector<Block> send;
      for (size_t d = 0; d < 3; ++d) {
        parts.push_back(std::make_unique<Buffer>(
            values(group.rank(), kCounts[d], static_cast<int>(d)), shared && kCounts[d]));
        send.push_back({reinterpret_cast<char*>(parts[d]->data), kCounts[d] * sizeof(float)});
      }
      std::vector<std::vector<float>> inputs;
      for (int rank = 0; rank < 3; ++rank)
        inputs.push_back(values(rank, kCounts[me], group.rank()));
      std::vector<float> result(kCounts[me]);
      {
        CallInfo info = make_call_info(Op::reduce_scatter, 0);
        info.uneven = 1;
        CollectiveCall call(group, info, kTestTimeout, false);
        reduce_scatter(call, send, reinterpret_cast<char*>(result.data()), kCounts[me],
                       DataType::f32, Reduction::sum);
      }
      for (size_t i = 0; i < kCounts[me]; ++i) CHECK(result[i] == tree(inputs, i, 0, 3));
    }
  });
}

TEST(a_ranks_own_block_may_overwrite_a_block_for_another_rank) {
  SmallPieces small;
  on_ranks(2, [&](Group& group) {
    for (bool shared : {true, false})
      for (size_t count : {100, 3000}) {
        // Rank 0 scatters (a, b) and receives its own block, a, into b.
        Buffer a(values(0, count, 1), shared), b(values(0, count, 2), shared);
        std::vector<float> got(count);
        const size_t bytes = count * sizeof(float);
        ExchangeBlocks blocks;
        blocks.send.resize(2);
        blocks.receive.resize(2);
        if (group.rank() == 0) {
          blocks.send = {{reinterpret_cast<char*>(a.data), bytes},
                         {reinterpret_cast<char*>(b.data), bytes}};
          blocks.receive[0] = {reinterpret_cast<char*>(b.data), bytes};
        } else {
          blocks.receive[0] = {reinterpret_cast<char*>(got.data()), bytes};
        }
        {
          CollectiveCall call(group, make_call_info(Op::scatter, count, 0), kTestTimeout, false);
          exchange(call, blocks);
        }
        const auto expected = values(0, count, group.rank() == 0 ? 1 : 2);
        CHECK(std::memcmp(group.rank() == 0 ? b.data : got.data(), expected.data(), bytes) == 0);
      }
  });
}

TEST(reproducible_all_reduce_leaves_absent_members_out) {
  on_ranks(3, [](Group& group) {
    // 8 leaves on 3 ranks; member 0 is absent in leaf 2, member 1 everywhere but in node 67.
    Bucket bucket;
    bucket.length = 96;
    bucket.members = {{0, 30}, {32, 64}};
    bucket.holders = {{{0, 2}, {2, 3}}, {{3, 4}, {4, 6}}, {{6, 8}}};
    bucket.leaves = 8;
    const auto& held = bucket.holders[static_cast<size_t>(group.rank())];
    const auto value = [](std::pair<int, int> node) {
      return -0.0f - static_cast<float>(node.first == 6);
    };
    char* packed =
        static_cast<char*>(Heap::instance().allocate(packed_bytes(bucket, group.rank())));
    auto* result = static_cast<float*>(Heap::instance().allocate(bucket.length * sizeof(float)));
    for (size_t i = 0; i < held.size(); ++i) {
      auto* node = reinterpret_cast<float*>(packed) + i * bucket.length;
      std::fill(node, node + bucket.length, value(held[i]));
      char* flags = packed + held.size() * bucket.length * sizeof(float) + i * 2;
      flags[0] = held[i].first != 2;
      flags[1] = held[i].first == 6;
      if (!flags[0]) std::fill(node, node + 32, 1e30f);  // must not be read
      if (!flags[1]) std::fill(node + 32, node + 96, 1e30f);
    }
    std::vector<bool> present;
    {
      CollectiveCall call(group, make_call_info(Op::reproducible_all_reduce, bucket.length),
                          kTestTimeout, false);
      present = reproducible_all_reduce(call, bucket, packed, reinterpret_cast<char*>(result));
    }
    CHECK(present[0] && present[1]);
    for (size_t i = 0; i < 30; ++i) CHECK(result[i] == -1.0f);
    for (size_t i = 32; i < 96; ++i) CHECK(result[i] == -1.0f);
    {
      CollectiveCall call(group, make_call_info(Op::barrier, 0), kTestTimeout, false);
      barrier(call);
    }
    Heap::instance().free(packed);
    Heap::instance().free(result);
  });
}

namespace {

// 8 leaves of `length` numbers on 5 ranks, of which rank 3 holds none.
Bucket uneven_bucket(size_t length) {
  Bucket bucket;
  bucket.length = length;
  bucket.members = {{0, length}};
  bucket.holders = {{{0, 2}, {2, 3}}, {{3, 4}}, {{4, 5}, {5, 6}, {6, 7}}, {}, {{7, 8}}};
  bucket.leaves = 8;
  return bucket;
}

// The sums along the tree, where node (lo, hi) holds values(lo).
std::vector<float> tree_of(const Bucket& bucket) {
  std::vector<std::pair<int, int>> nodes;
  std::vector<std::vector<float>> held;
  for (const auto& each : bucket.holders)
    for (const auto& node : each) {
      nodes.push_back(node);
      held.push_back(values(node.first, bucket.length, 23));
    }
  const std::vector<int> steps = tree_steps(nodes, bucket.leaves);
  std::vector<float> sums;
  for (size_t i = 0; i < bucket.length; ++i) {
    std::vector<float> stack;
    for (int step : steps) {
      if (step != kCombine) {
        stack.push_back(held[static_cast<size_t>(step)][i]);
        continue;
      }
      const float top = stack.back();
      stack.pop_back();
      stack.back() += top;
    }
    sums.push_back(stack[0]);
  }
  return sums;
}

// Sums `bucket` on 5 ranks into each rank's first node, or into a separate buffer if it has
// none, repeatedly, and passes every rank's result to `check_result`.
void sum_in_place(const Bucket& bucket,
                  const std::function<void(int rank, const float* result)>& check_result) {
  on_ranks(5, [&](Group& group) {
    const int rank = group.rank();
    const auto& held = bucket.holders[static_cast<size_t>(rank)];
    auto* packed = static_cast<float*>(Heap::instance().allocate(packed_bytes(bucket, rank)));
    auto* own = static_cast<float*>(Heap::instance().allocate(bucket.length * sizeof(float)));
    float* result = held.empty() ? own : packed;
    std::memset(packed + held.size() * bucket.length, 1, held.size());
    for (int again = 0; again < 20; ++again) {
      std::fill(own, own + bucket.length, 7.0f);
      for (size_t i = 0; i < held.size(); ++i) {
        const auto filled = values(held[i].first, bucket.length, 23);
        std::copy(filled.begin(), filled.end(), packed + i * bucket.length);
      }
      {
        CollectiveCall call(group, make_call_info(Op::reproducible_all_reduce, bucket.length),
                            kTestTimeout, false);
        reproducible_all_reduce(call, bucket, reinterpret_cast<char*>(packed),
                                reinterpret_cast<char*>(result));
      }
      check_result(rank, result);
    }
    {
      CollectiveCall call(group, make_call_info(Op::barrier, 0), kTestTimeout, false);
      barrier(call);
    }
    Heap::instance().free(packed);
    Heap::instance().free(own);
  });
}

}  // namespace

TEST(reproducible_all_reduce_in_place_adds_along_the_tree) {
  for (const std::vector<size_t>& cuts : {std::vector<size_t>{}, {0, 1, 1, 3000, 5003, 5003}}) {
    Bucket bucket = uneven_bucket(5003);
    bucket.cuts = cuts;
    const std::vector<float> expected = tree_of(bucket);
    sum_in_place(bucket, [&](int, const float* result) {
      CHECK(std::memcmp(result, expected.data(), expected.size() * sizeof(float)) == 0);
    });
  }
}

TEST(scattered_reproducible_all_reduce_writes_only_a_ranks_own_slice) {
  Bucket bucket = uneven_bucket(5003);
  bucket.cuts = {0, 17, 1000, 1000, 4099, 5003};
  bucket.scatter = true;
  const std::vector<float> expected = tree_of(bucket);
  sum_in_place(bucket, [&](int rank, const float* result) {
    const auto& held = bucket.holders[static_cast<size_t>(rank)];
    const auto before = held.empty() ? std::vector<float>(bucket.length, 7.0f)
                                     : values(held[0].first, bucket.length, 23);
    const size_t begin = bucket.cuts[static_cast<size_t>(rank)];
    const size_t end = bucket.cuts[static_cast<size_t>(rank) + 1];
    for (size_t i = 0; i < bucket.length; ++i)
      CHECK(result[i] == (i >= begin && i < end ? expected[i] : before[i]));
  });
}

TEST(a_rank_publishes_and_adds_in_steps_without_waiting) {
  const Bucket bucket = uneven_bucket(5003);
  const std::vector<float> expected = tree_of(bucket);
  on_ranks(5, [&](Group& group) {
    const int rank = group.rank();
    const auto& held = bucket.holders[static_cast<size_t>(rank)];
    const size_t row = bucket.length * sizeof(float);
    std::vector<char*> packed, results;
    std::vector<std::unique_ptr<SteppedSum>> sums;
    for (int number = 0; number < 3; ++number) {
      packed.push_back(static_cast<char*>(Heap::instance().allocate(packed_bytes(bucket, rank))));
      results.push_back(static_cast<char*>(Heap::instance().allocate(row)));
      auto* values_of = reinterpret_cast<float*>(packed.back());
      for (size_t i = 0; i < held.size(); ++i) {
        const auto filled = values(held[i].first, bucket.length, 23);
        std::copy(filled.begin(), filled.end(), values_of + i * bucket.length);
      }
      std::memset(values_of + held.size() * bucket.length, 1, held.size());
      sums.push_back(std::make_unique<SteppedSum>(
          group, make_call_info(Op::reproducible_all_reduce, bucket.length), bucket, packed.back(),
          results.back(), nullptr, kTestTimeout));
    }
    // Rank 4 comes last: it publishes after all others have returned from their first step.
    static std::atomic<int> returned;
    returned = 0;
    run_barrier(group);
    if (rank == 4) {
      while (returned < 4) std::this_thread::yield();
    } else {
      CHECK(sums[0]->advance() == Progress::waiting);
      ++returned;
    }
    for (size_t number = 0; number < 3; ++number) {
      while (sums[number]->advance() == Progress::waiting) std::this_thread::yield();
      // Others may still add to this sum when the next one is published.
    }
    for (const auto& sum : sums) sum->finish(false);
    for (size_t number = 0; number < 3; ++number) {
      CHECK(sums[number]->is_new() == std::vector<bool>{true});
      CHECK(std::memcmp(results[number], expected.data(), row) == 0);
    }
    run_barrier(group);
    for (size_t number = 0; number < 3; ++number) {
      Heap::instance().free(packed[number]);
      Heap::instance().free(results[number]);
    }
  });
}

TEST(inconsistent_buckets_are_refused) {
  Bucket bucket = uneven_bucket(64);
  std::vector<char> packed(packed_bytes(bucket, 0) + 4096);
  const auto refusal = [&](const Bucket& asked, size_t offset) {
    return error_of([&] { check(asked, 0, packed.data(), packed.data() + offset); });
  };
  CHECK(refusal(bucket, 0).empty() && refusal(bucket, 256).empty());
  CHECK(refusal(bucket, packed_bytes(bucket, 0)).empty());
  CHECK(contains(refusal(bucket, 128), "overlaps"));
  CHECK(contains(refusal(bucket, 512), "overlaps"));  // the flags
  for (const std::vector<size_t>& cuts : {std::vector<size_t>{0, 64},
                                          {0, 1, 2, 3, 4, 65},
                                          {0, 9, 8, 10, 11, 64},
                                          {1, 1, 1, 1, 1, 64}}) {
    bucket.cuts = cuts;
    CHECK(contains(refusal(bucket, 0), "ascend"));
  }
  bucket.cuts.clear();
  bucket.members = {{60, 5}};
  CHECK(contains(refusal(bucket, 0), "ends outside"));
}

// Returns what a rank with these nodes of `uneven_bucket` sends with another message.
static std::string packed_message(const Bucket& bucket, int rank, uint64_t digest) {
  std::string message = "other message";
  const auto& held = bucket.holders[static_cast<size_t>(rank)];
  for (const auto& node : held) {
    const auto filled = values(node.first, bucket.length, 23);
    message.append(reinterpret_cast<const char*>(filled.data()), bucket.length * sizeof(float));
  }
  message.append(held.size() * bucket.members.size(), kNew);
  return message.append(reinterpret_cast<const char*>(&digest), sizeof digest);
}

TEST(nodes_in_messages_are_added_along_the_tree) {
  const Bucket bucket = uneven_bucket(603);
  std::vector<std::string> sent;
  for (int rank = 0; rank < 5; ++rank)
    sent.push_back(packed_message(bucket, rank, bucket.digest()));
  std::vector<float> result(bucket.length, 7.0f);
  auto* to = reinterpret_cast<char*>(result.data());
  CHECK(add_packed(bucket, {sent.begin(), sent.end()}, to) == std::vector<bool>{true});
  CHECK(result == tree_of(bucket));
  // Absent from all nodes: nothing is added.
  for (int rank = 0; rank < 5; ++rank) {
    const size_t flags = bucket.holders[static_cast<size_t>(rank)].size();
    std::fill_n(sent[static_cast<size_t>(rank)].end() - 8 - static_cast<long>(flags), flags, 0);
  }
  std::fill(result.begin(), result.end(), 7.0f);
  CHECK(add_packed(bucket, {sent.begin(), sent.end()}, to) == std::vector<bool>{false});
  CHECK(result == std::vector<float>(bucket.length, 7.0f));
}

TEST(messages_without_nodes_of_the_bucket_are_refused) {
  const Bucket bucket = uneven_bucket(603);
  std::vector<std::string> sent;
  for (int rank = 0; rank < 5; ++rank)
    sent.push_back(packed_message(bucket, rank, bucket.digest()));
  std::vector<float> result(bucket.length);
  auto* to = reinterpret_cast<char*>(result.data());
  const auto refusal = [&](int rank, const std::string& message) {
    std::vector<std::string_view> changed(sent.begin(), sent.end());
    changed[static_cast<size_t>(rank)] = message;
    return error_of([&] { add_packed(bucket, changed, to); });
  };
  CHECK(contains(refusal(2, packed_message(bucket, 2, bucket.digest() + 2)), "rank 2"));
  CHECK(contains(refusal(4, sent[4].substr(sent[4].size() - 100)), "rank 4"));
  CHECK(contains(refusal(3, ""), "rank 3"));
  sent.pop_back();
  CHECK(contains(error_of([&] { add_packed(bucket, {sent.begin(), sent.end()}, to); }), "rank 4"));
}

TEST(messages_of_any_length_up_to_a_slot_reach_all_ranks) {
  on_ranks(3, [](Group& group) {
    const size_t longest = longest_message(group.layout());
    for (size_t again = 0; again < 60; ++again) {
      const auto message = [&](int rank) {
        const size_t bytes = again % 3 == static_cast<size_t>(rank) ? longest : again * rank;
        return std::string(bytes, static_cast<char>('a' + (again + rank) % 26));
      };
      const std::string mine = message(group.rank());
      CallInfo info = make_call_info(Op::all_gather_bytes, mine.size());
      info.uneven = 1;
      CollectiveCall call(group, info, kTestTimeout, false);
      const auto found = all_gather_bytes(call, mine);
      for (int rank = 0; rank < 3; ++rank) CHECK(found[static_cast<size_t>(rank)] == message(rank));
    }
  });
}

TEST(a_message_that_is_longer_than_a_slot_is_refused) {
  on_ranks(1, [](Group& group) {
    const std::string message(longest_message(group.layout()) + 1, 'a');
    CollectiveCall call(group, make_call_info(Op::all_gather_bytes, 1), kTestTimeout, false);
    CHECK(contains(error_of([&] { all_gather_bytes(call, message); }), "is longer than"));
  });
}

TEST(different_plans_have_different_digests) {
  const Bucket bucket = uneven_bucket(640);
  Bucket other = bucket;
  CHECK(bucket.digest() == other.digest());
  other.cuts = {0, 1, 2, 3, 4, 640};
  CHECK(bucket.digest() != other.digest());
  other = bucket;
  other.scatter = true;
  CHECK(bucket.digest() != other.digest());
  other = bucket;
  other.type = DataType::f64;
  CHECK(bucket.digest() != other.digest());
  other = bucket;
  ++other.length;
  CHECK(bucket.digest() != other.digest());
  other = bucket;
  std::swap(other.holders[0], other.holders[1]);
  CHECK(bucket.digest() != other.digest());
}

TEST(shared_memory_is_the_same_on_all_ranks) {
  on_ranks(3, [](Group& group) {
    CallInfo info = make_call_info(Op::share, 100000);
    std::unique_ptr<Segment> segment;
    {
      CollectiveCall call(group, info, kTestTimeout, false);
      segment = share(call, 100000);
    }
    auto* words = reinterpret_cast<std::atomic<int>*>(segment->data() + kSharedStart);
    words[group.rank()].store(group.rank() + 5);
    {
      CollectiveCall call(group, make_call_info(Op::barrier, 0), kTestTimeout, false);
      barrier(call);
    }
    for (int rank = 0; rank < 3; ++rank) CHECK(words[rank].load() == rank + 5);
  });
}

TEST(too_much_shared_memory_is_refused_on_every_rank) {
  on_ranks(3, [](Group& group) {
    const std::string text = error_of([&] {
      CollectiveCall call(group, make_call_info(Op::share, 0), kTestTimeout, false);
      share(call, uint64_t{1} << 50);
    });
    CHECK(contains(text, "rank 0 could not share memory: "));
    CHECK(contains(text, "MiB of shared memory"));
    CollectiveCall call(group, make_call_info(Op::barrier, 0), kTestTimeout, false);
    barrier(call);  // the group is still usable
  });
}

TEST(shared_memory_of_a_rank_that_has_ended_is_the_loss_of_that_rank) {
  if (!kMayFork) return;
  const SegmentHandle handle = handle_of_dead_process();
  on_ranks(2, [&](Group& group) {
    CollectiveCall call(group, make_call_info(Op::share, 4096), kTestTimeout, false);
    Loss loss = Loss::none;
    try {
      if (group.rank() == 1) {
        share(call, 4096);
      } else {  // as if it had been killed once it had published its handle, and had arrived
        std::memset(call.own_slot(), 0, sizeof handle + kTextBytes);
        std::memcpy(call.own_slot(), &handle, sizeof handle);
        call.arrive();
        call.sync();
      }
    } catch (const CommError& error) {
      loss = error.failure.loss;
      CHECK(error.failure.rank == 0);
    }
    CHECK(loss == Loss::unopened);
  });
}

TEST(mismatched_calls_are_reported_on_every_rank) {
  on_ranks(3, [](Group& group) {
    std::vector<float> data(100, 1.f);
    const size_t count = group.rank() == 1 ? 99 : 100;
    const std::string text = error_of([&] {
      CollectiveCall call(group, make_call_info(Op::all_reduce, count), kTestTimeout, false);
      all_reduce(call, data.data(), count, DataType::f32, Reduction::sum);
    });
    CHECK(contains(text, "ranks 0, 2 called all_reduce(SUM, dtype 0, 100 elements)"));
    CHECK(contains(text, "rank 1 called all_reduce(SUM, dtype 0, 99 elements)"));
    // The group is still usable.
    CollectiveCall call(group, make_call_info(Op::barrier, 0), kTestTimeout, false);
    barrier(call);
  });
}

TEST(mismatched_block_sizes_are_reported) {
  on_ranks(2, [](Group& group) {
    std::vector<char> data(1000);
    ExchangeBlocks blocks;
    blocks.send = {{data.data(), 8}, {data.data(), 8}};
    blocks.receive = {{data.data() + 500, 8}, {data.data() + 600, group.rank() == 0 ? 9u : 8u}};
    CallInfo info = make_call_info(Op::all_to_all, 0);
    info.uneven = 1;
    const std::string text = error_of([&] {
      CollectiveCall call(group, info, kTestTimeout, false);
      exchange(call, blocks);
    });
    CHECK(contains(text, "disagree"));
    CHECK(contains(text, "rank 1 sends 8 bytes to rank 0, which expects 9; ranks 0, 1 called"));
  });
}

TEST(kernels_give_the_same_bits_on_every_processor) {
  const Kernels& plain = *find_kernels("plain");
  std::vector<uint16_t> halves(1 << 16), back(1 << 16);
  std::vector<float> wide(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const char* name : {"plain", "avx2", "avx512"}) {
    const Kernels* kernels = find_kernels(name);
    if (!kernels) continue;
    for (int kind : {0, 1}) {
      kernels->widen[kind](wide.data(), halves.data(), halves.size());
      kernels->narrow[kind](back.data(), wide.data(), wide.size());
      for (size_t i = 0; i < halves.size(); ++i)
        if (wide[i] == wide[i])
          CHECK(back[i] == halves[i]);
        else
          CHECK((back[i] & 0x7fff) > (kind ? 0x7f80 : 0x7c00));
    }
    const auto a = values(1, 1003, 1), b = values(2, 1003, 2);
    for (int r = 0; r < 5; ++r) {
      // To three outputs at once, one of which is an input.
      std::vector<float> x(1003), y(1003), z(1003), in_place = a;
      char* one[] = {reinterpret_cast<char*>(x.data())};
      char* three[] = {reinterpret_cast<char*>(y.data()), reinterpret_cast<char*>(in_place.data()),
                       reinterpret_cast<char*>(z.data())};
      plain.combine[r][1](one, 1, a.data(), b.data(), 1003);
      kernels->combine[r][1](three, 3, in_place.data(), b.data(), 1003);
      for (const char* copy : three) CHECK(std::memcmp(x.data(), copy, 1003 * sizeof(float)) == 0);
    }
  }
}

TEST(narrowing_rounds_to_nearest_even) {
  const Kernels& k = kernels();
  const float inputs[] = {1.0f + 1.0f / 2048, 1.0f + 3.0f / 2048, 65519.9f,      65520.0f, 1e-8f,
                          5.9604645e-8f,      2.9802322e-8f,      2.98023259e-8f};
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
  CHECK(!error_of([] { tree_steps({{0, 1}}, 2); }).empty());
}
