// Which of two ways is faster at present, found by trying both now and then.
//
//     call     0 1  2 3  4 5  6 7  8 ...... 31  32 33  34 ...... 63  64 65
//     way      A A  B B  A A  B B  the better    A A    the better    B B
//     counted    x    x    x    x                  x                    x
//
// Ranks count the same calls, so all try the same way at the same time, and each
// sees what the group takes with it. Whoever then settles on the other way only
// loses time. The first call of a trial finds the caches as the other way left
// them and is not counted. Three times of each are kept; their median bears one
// call in which another program had the core. In between, the worse way costs 2
// of 64 calls, and a change of the machine is followed after 2 trials of a way;
// or at once where the chosen way, in the median of 3 calls between the trials, takes
// half as long again as the other did when it was tried last.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace lockstep {

class Choice {
 public:
  static constexpr uint32_t kTrial = 2, kOpening = 4, kPeriod = 32;  // calls, trials, calls

  // Which way, 0 or 1, the call that begins now goes.
  int way() const { return trying() ? tried() : better(); }

  // How long that call took, in any unit; ends it.
  void took(double time) {
    if (!trying())
      watch(static_cast<size_t>(better()), time);
    else if (calls_ % kTrial == kTrial - 1)
      ways_[static_cast<size_t>(tried())].add(time);
    ++calls_;
  }

  // The way to go where nothing is tried; the first one where both are alike.
  int better() const { return ways_[1].typical() < ways_[0].typical() ? 1 : 0; }

 private:
  struct Times {
    std::array<double, 3> last{};
    uint32_t count = 0;
    void add(double time) { last[count++ % 3] = time; }
    // The median; of fewer than three the smallest; of none 0.
    double typical() const {
      std::array<double, 3> sorted = last;
      const uint32_t known = std::min(count, 3u);
      std::sort(sorted.begin(), sorted.begin() + known);
      return sorted[known == 3 ? 1 : 0];
    }
  };

  // A call the chosen way. Less than half as long again may be another program's doing.
  void watch(size_t chosen, double time) {
    if (chosen != watched_) recent_ = {};
    watched_ = chosen;
    recent_.add(time);
    if (recent_.count < 3 || recent_.typical() <= 1.5 * ways_[1 - chosen].typical()) return;
    ways_[chosen] = recent_;  // and so the other one is the better from now on
    recent_ = {};
  }

  bool opening() const { return calls_ < kTrial * kOpening; }
  bool trying() const { return opening() || calls_ % kPeriod < kTrial; }
  int tried() const {
    return static_cast<int>((opening() ? calls_ / kTrial : calls_ / kPeriod - 1) % 2);
  }

  std::array<Times, 2> ways_;
  Times recent_;  // of the chosen way, between trials
  size_t watched_ = 0;
  uint32_t calls_ = 0;
};

}  // namespace lockstep
