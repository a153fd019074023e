#include "share.h"

#include "../failure.h"
#include "../liveness.h"

namespace lockstep {
namespace {

// What a rank says in its slot; `wrong` is empty where all is well.
struct Report {
  Address address;
  char wrong[kText];
};

Report& report(Turn& turn, int rank) { return *reinterpret_cast<Report*>(turn.slot(rank)); }

// Does `work`; what it throws goes into this rank's report.
template <typename Work>
void attempt(Turn& turn, Work work) {
  copy_text(report(turn, turn.rank()).wrong, "");
  try {
    work();
  } catch (const Failure& error) {
    copy_text(report(turn, turn.rank()).wrong, error.what());
  }
}

void check_reports(Turn& turn) {
  for (int rank = 0; rank < turn.size(); ++rank) {
    const std::string wrong = read_text(report(turn, rank).wrong);
    if (!wrong.empty())
      throw Refusal(turn.group().name_of(rank) + " could not share memory: " + wrong);
  }
}

}  // namespace

std::unique_ptr<Segment> share(Turn& turn, uint64_t bytes) {
  std::unique_ptr<Segment> segment;
  if (turn.rank() == 0)
    attempt(turn, [&] {
      const uint64_t whole = kSharedStart + bytes;
      segment = std::make_unique<Segment>(Segment::create("lockstep-shared", whole, whole));
      segment->prefault(0, segment->bytes());
      report(turn, 0).address = segment->address();
    });
  turn.arrive();
  if (turn.rank() != 0)
    attempt(turn, [&] {
      if (!read_text(report(turn, 0).wrong).empty()) return;
      segment = std::make_unique<Segment>(Segment::attach(report(turn, 0).address));
      segment->prefault(0, segment->bytes());
    });
  turn.sync();
  check_reports(turn);
  if (turn.rank() == 0) segment->seal();
  return segment;
}

}  // namespace lockstep
