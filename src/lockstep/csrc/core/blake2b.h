// BLAKE2b of a short message, for the seeds of random numbers (`lockstep.randomness`).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

constexpr size_t kBlake2bBlock = 128;  // bytes

// Returns the digest of 8 bytes, read as an integer in little-endian order. See RFC 7693.
// `message` has at most one block.
uint64_t blake2b_64(const void* message, size_t bytes);

}  // namespace lockstep
