// Being alive, and noticing that another rank is not.
//
// Every rank has a keeper thread that locks the rank's robust mutex and holds it
// as long as the process lives. When the process ends, however it ends, the kernel
// marks the mutex within a fraction of a millisecond, before it frees the memory:
// whoever tries the lock then learns it. The keeper also answers the question
// "where are you?" of a rank that has waited too long, so that the answer costs
// nothing as long as nobody asks. It sleeps otherwise.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "layout.h"

namespace lockstep {

// Prepares the robust mutex of a record, once, before anybody attaches.
void prepare_lock(Record& record);

enum class Health { fine, left, dead };
Health health(Record& record);

class Keeper {
 public:
  // `where` says where this rank is in its own code; called on the keeper's thread.
  Keeper(Record& record, std::function<std::string()> where);
  ~Keeper();  // marks the rank as left

  // Writes `text` where others read it.
  void say(const std::string& text);

 private:
  void run();

  Record& record_;
  std::function<std::string()> where_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> started_{false};
  std::atomic_flag writing_ = ATOMIC_FLAG_INIT;
  std::thread thread_;
};

// Asks a rank where it is; its answer, or what its silence means.
std::string ask(Record& record, std::chrono::milliseconds patience);

void copy_text(char* to, const std::string& text);
std::string read_text(const char* from);

}  // namespace lockstep
