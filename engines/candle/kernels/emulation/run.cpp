// Runs kernels on the host; see `cuda.h`. The only entry point is `genset_emulate`.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ucontext.h>

#define GENSET_BF16
#define GENSET_F16
#define GENSET_F32
#define GENSET_LOGITS

#include "cuda.h"

namespace emulation {

__thread Index thread, block;

namespace {

constexpr unsigned LANES = 32;
constexpr size_t STACK = 128 * 1024;

struct Entry {
  unsigned threads;
  void (*run)(const void *);
};

std::map<std::string, Entry> &kernels() {
  static std::map<std::string, Entry> all;
  return all;
}

struct Fiber {
  ucontext_t first;
  std::jmp_buf point;
  std::unique_ptr<char[]> stack;
  bool has_begun = false;
  // The buffer of its next exchange, one of two: no lane can be two exchanges ahead of another.
  unsigned turn;
};

struct Warp {
  unsigned waiting;
  unsigned words[2][LANES];
  float numbers[2][LANES][12];
};

struct Machine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;
  unsigned threads, waiting, done, running;
  const void *arguments;
  void (*run)(const void *);
  std::jmp_buf scheduler;
  std::minstd_rand random;
};

// That of this thread; a pointer, because each use of an object with a constructor would check that it has run.
__thread Machine *machine;

// Leaves the running fiber until it is chosen again, after a `release`.
void suspend() {
  if (_setjmp(machine->fibers[machine->running]->point) == 0) _longjmp(machine->scheduler, 1);
}

// Runs one thread of each block.
void fiber_main() {
  for (;;) {
    machine->run(machine->arguments);
    machine->done++;
    suspend();
  }
}

std::unique_ptr<Fiber> new_fiber(size_t number) {
  auto fiber = std::make_unique<Fiber>();
  fiber->stack = std::make_unique<char[]>(STACK);
  getcontext(&fiber->first);
  fiber->first.uc_stack.ss_sp = fiber->stack.get();
  // Stacks that begin at the same place of a page would share few lines of the cache.
  fiber->first.uc_stack.ss_size = STACK - number % 8 * 512;
  fiber->first.uc_link = nullptr;
  makecontext(&fiber->first, fiber_main, 0);
  return fiber;
}

void release(unsigned from, unsigned to) {
  for (unsigned i = from; i < to; i++) machine->ready.push_back(i);
}

void wait_for_warp() {
  const unsigned warp = machine->running / LANES;
  if (++machine->warps[warp].waiting == LANES) {
    machine->warps[warp].waiting = 0;
    release(warp * LANES, (warp + 1) * LANES);
  }
  suspend();
}

void enter(unsigned number) {
  Fiber &fiber = *machine->fibers[number];
  machine->running = number;
  thread = {number, 0, 0};
  if (fiber.has_begun) _longjmp(fiber.point, 1);
  fiber.has_begun = true;
  setcontext(&fiber.first);
}

// Runs one block; returns false if its threads wait for each other at different places.
bool run_block() {
  machine->waiting = machine->done = 0;
  machine->ready.clear();
  for (Warp &warp : machine->warps) warp.waiting = 0;
  for (unsigned i = 0; i < machine->threads; i++) machine->fibers[i]->turn = 0;
  release(0, machine->threads);
  _setjmp(machine->scheduler);
  if (machine->ready.empty()) return machine->done == machine->threads;
  std::swap(machine->ready[machine->random() % machine->ready.size()], machine->ready.back());
  const unsigned next = machine->ready.back();
  machine->ready.pop_back();
  enter(next);
  return false; // not reached: `enter` leaves through the scheduler
}

} // namespace

void wait_for_block() {
  if (++machine->waiting == machine->threads) {
    machine->waiting = 0;
    release(0, machine->threads);
  }
  suspend();
}

const float (*gather(const float (&numbers)[12]))[12] {
  auto &buffer = machine->warps[machine->running / LANES].numbers[machine->fibers[machine->running]->turn ^= 1];
  std::copy(std::begin(numbers), std::end(numbers), buffer[machine->running % LANES]);
  wait_for_warp();
  return buffer;
}

unsigned exchange(unsigned word, unsigned lane) {
  auto &buffer = machine->warps[machine->running / LANES].words[machine->fibers[machine->running]->turn ^= 1];
  buffer[machine->running % LANES] = word;
  wait_for_warp();
  return buffer[lane];
}

void check_alignment(const void *address, size_t size) {
  if (reinterpret_cast<uintptr_t>(address) % size == 0) return;
  std::fprintf(stderr, "a kernel reads %zu bytes at %p, which is no multiple of it\n", size, address);
  std::abort();
}

Kernel::Kernel(const char *name, unsigned threads, void (*run)(const void *)) { kernels()[name] = {threads, run}; }

} // namespace emulation

// Returns 0 when done, 1 for an unknown kernel, 2 if threads wait for each other at different places (their stacks are then
// abandoned).
extern "C" int genset_emulate(const char *name, const unsigned grid[3], const void *arguments) {
  using namespace emulation;
  const auto found = kernels().find(name);
  if (found == kernels().end()) return 1;
  static thread_local Machine own;
  machine = &own;
  machine->run = found->second.run;
  machine->threads = found->second.threads;
  machine->arguments = arguments;
  machine->warps.assign(machine->threads / LANES, Warp());
  while (machine->fibers.size() < machine->threads) machine->fibers.push_back(new_fiber(machine->fibers.size()));
  for (block.z = 0; block.z < grid[2]; block.z++)
    for (block.y = 0; block.y < grid[1]; block.y++)
      for (block.x = 0; block.x < grid[0]; block.x++)
        if (!run_block()) {
          machine->fibers.clear();
          return 2;
        }
  return 0;
}

#include "../genset.cu"
