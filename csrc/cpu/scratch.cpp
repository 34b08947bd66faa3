#include "specengine/scratch.h"

#include <cstdint>
#include <memory>

namespace specengine {

void* scratch(std::size_t bytes) {
  constexpr std::size_t kAlign = 64;
  thread_local std::unique_ptr<char[]> memory;
  thread_local std::size_t capacity = 0;
  if (capacity < bytes + kAlign) {
    capacity = bytes + bytes / 2 + kAlign;
    memory.reset(new char[capacity]);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  return reinterpret_cast<void*>((address + kAlign - 1) / kAlign * kAlign);
}

}  // namespace specengine
