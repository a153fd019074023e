#include "peer_memory.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "kernels.h"

namespace lockstep {

PeerMemory::PeerMemory(Group& group) : group_(group) {
  const char* no_read = std::getenv("LOCKSTEP_NO_READ");  // tests: use the bounce buffers
  access_.assign(static_cast<size_t>(group.size()),
                 no_read && *no_read ? Access::refused : Access::unknown);
}

bool PeerMemory::read_segment(const Cell& cell, char* to) {
  if (!cell.buffer.is_shared()) return false;
  try {
    copy_result(to, group_.peer_mappings().map(cell.buffer, cell.bytes), cell.bytes,
                group_.fills_cache(2 * cell.bytes));  // source and destination
    return true;
  } catch (const CommError&) {
    return false;  // no free file descriptor, or the sender has died: try the other ways
  }
}

static bool read_memory(int pid, uint64_t address, char* to, uint64_t bytes) {
  while (bytes > 0) {
    iovec local{to, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    to += got;
    address += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return true;
}

bool PeerMemory::may_read(int source) {
  Access& access = access_[static_cast<size_t>(source)];
  RankState& state = group_.rank_state(source);
  if (access == Access::unknown) {
    // The kernel may forbid it, or the pid may name another process in this PID namespace.
    Nonce probe;
    const bool is_read =
        read_memory(state.pid, state.probe_address, reinterpret_cast<char*>(&probe), sizeof probe);
    access = is_read && probe == state.probe ? Access::allowed : Access::refused;
  }
  return access == Access::allowed;
}

void PeerMemory::throw_unread(int source) {
  const int reason = errno;
  const std::string text =
      "the memory of " + group_.format_rank(source) + " cannot be read: " + std::strerror(reason);
  const Loss loss = reason == ESRCH ? Loss::unopened : Loss::none;
  throw CommError(text, {text, loss, group_.global_rank(source)});
}

void PeerMemory::read(int source, uint64_t address, char* to, uint64_t bytes) {
  if (!read_memory(group_.rank_state(source).pid, address, to, bytes)) throw_unread(source);
}

}  // namespace lockstep
