// parallel_for over independent tasks, on the OpenMP runtime that torch has already loaded (one pool in the process).
// A result must not depend on which thread runs a task. Everything lies in the
// including instruction set's namespace (SPECENGINE_ISA), so that the linker can't mix code of different sets.
#pragma once

#include <cstdint>

namespace specengine {
namespace SPECENGINE_ISA {

template <class Task>
void parallel_for(int64_t tasks, int threads, const Task& task) {
#ifdef _OPENMP
  if (threads > 1 && tasks > 1) {
    const int team = static_cast<int>(tasks < threads ? tasks : threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
#endif
  for (int64_t i = 0; i < tasks; ++i) task(i);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace SPECENGINE_ISA
}  // namespace specengine
