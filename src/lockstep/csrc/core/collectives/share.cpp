#include "share.h"

#include "../errors.h"
#include "../liveness.h"

namespace lockstep {
namespace {

// What a rank publishes in its slot; `error` is empty if it succeeded.
struct ShareResult {
  SegmentHandle handle;
  char error[kTextBytes];
};

ShareResult& result_of(CollectiveCall& call, int rank) {
  return *reinterpret_cast<ShareResult*>(call.slot(rank));
}

// Runs `work` and publishes its error, unless rank 0 is lost, which no rank survives.
template <typename Work>
void publish_error_of(CollectiveCall& call, Work work) {
  copy_text(result_of(call, call.rank()).error, "");
  try {
    work();
  } catch (const UnopenedError& error) {
    call.fail_unopened(0, error);
  } catch (const CommError& error) {
    copy_text(result_of(call, call.rank()).error, error.what());
  }
}

void throw_if_any_failed(CollectiveCall& call) {
  for (int rank = 0; rank < call.size(); ++rank) {
    const std::string error = read_text(result_of(call, rank).error);
    if (!error.empty())
      throw CallError(call.group().format_rank(rank) + " could not share memory: " + error);
  }
}

}  // namespace

std::unique_ptr<Segment> share(CollectiveCall& call, uint64_t bytes) {
  std::unique_ptr<Segment> segment;
  if (call.rank() == 0)
    publish_error_of(call, [&] {
      const uint64_t total = kSharedStart + bytes;
      segment = std::make_unique<Segment>(Segment::create("lockstep-shared", total, total));
      segment->prefault(0, segment->bytes());
      result_of(call, 0).handle = segment->handle();
    });
  call.arrive();
  if (call.rank() != 0)
    publish_error_of(call, [&] {
      if (!read_text(result_of(call, 0).error).empty()) return;
      segment = std::make_unique<Segment>(Segment::attach(result_of(call, 0).handle));
      segment->prefault(0, segment->bytes());
    });
  call.sync();
  throw_if_any_failed(call);
  if (call.rank() == 0) segment->close_descriptor();
  return segment;
}

}  // namespace lockstep
