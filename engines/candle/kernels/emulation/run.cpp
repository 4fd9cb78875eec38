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

Index thread, block;

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
  bool has_begun;
  // The buffer of its next exchange, one of two: no lane can be two exchanges ahead of another.
  unsigned turn;
};

struct Warp {
  unsigned waiting;
  unsigned words[2][LANES][6];
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

Machine machine;

void fiber_main() {
  machine.run(machine.arguments);
  machine.done++;
  _longjmp(machine.scheduler, 1);
}

// Leaves the running fiber until it is chosen again, after a `release`.
void suspend() {
  if (_setjmp(machine.fibers[machine.running]->point) == 0) _longjmp(machine.scheduler, 1);
}

void release(unsigned from, unsigned to) {
  for (unsigned i = from; i < to; i++) machine.ready.push_back(i);
}

void wait_for_warp() {
  const unsigned warp = machine.running / LANES;
  if (++machine.warps[warp].waiting == LANES) {
    machine.warps[warp].waiting = 0;
    release(warp * LANES, (warp + 1) * LANES);
  }
  suspend();
}

void enter(unsigned number) {
  Fiber &fiber = *machine.fibers[number];
  machine.running = number;
  thread = {number, 0, 0};
  if (fiber.has_begun) _longjmp(fiber.point, 1);
  fiber.has_begun = true;
  setcontext(&fiber.first);
}

// Runs one block; returns false if its threads wait for each other at different places.
bool run_block() {
  machine.waiting = machine.done = 0;
  machine.ready.clear();
  for (Warp &warp : machine.warps) warp.waiting = 0;
  for (unsigned i = 0; i < machine.threads; i++) {
    Fiber &fiber = *machine.fibers[i];
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = STACK;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, fiber_main, 0);
    fiber.has_begun = false;
    fiber.turn = 0;
  }
  release(0, machine.threads);
  _setjmp(machine.scheduler);
  if (machine.ready.empty()) return machine.done == machine.threads;
  std::swap(machine.ready[machine.random() % machine.ready.size()], machine.ready.back());
  const unsigned next = machine.ready.back();
  machine.ready.pop_back();
  enter(next);
  return false; // not reached: `enter` leaves through the scheduler
}

} // namespace

void wait_for_block() {
  if (++machine.waiting == machine.threads) {
    machine.waiting = 0;
    release(0, machine.threads);
  }
  suspend();
}

const unsigned (*gather(const unsigned (&words)[6]))[6] {
  Fiber &fiber = *machine.fibers[machine.running];
  Warp &warp = machine.warps[machine.running / LANES];
  auto &buffer = warp.words[fiber.turn ^= 1];
  std::copy(std::begin(words), std::end(words), buffer[machine.running % LANES]);
  wait_for_warp();
  return buffer;
}

unsigned exchange(unsigned word, unsigned lane) {
  const unsigned words[6] = {word};
  return gather(words)[lane][0];
}

void check_alignment(const void *address, size_t size) {
  if (reinterpret_cast<uintptr_t>(address) % size == 0) return;
  std::fprintf(stderr, "a kernel reads %zu bytes at %p, which is no multiple of it\n", size, address);
  std::abort();
}

Kernel::Kernel(const char *name, unsigned threads, void (*run)(const void *)) { kernels()[name] = {threads, run}; }

} // namespace emulation

// Returns 0 when done, 1 for an unknown kernel, 2 if threads wait for each other at different places (their stacks are then
// abandoned). One call at a time.
extern "C" int genset_emulate(const char *name, const unsigned grid[3], const void *arguments) {
  using namespace emulation;
  const auto found = kernels().find(name);
  if (found == kernels().end()) return 1;
  machine.run = found->second.run;
  machine.threads = found->second.threads;
  machine.arguments = arguments;
  machine.warps.assign(machine.threads / LANES, Warp());
  while (machine.fibers.size() < machine.threads) {
    machine.fibers.push_back(std::make_unique<Fiber>());
    machine.fibers.back()->stack = std::make_unique<char[]>(STACK);
  }
  for (block.z = 0; block.z < grid[2]; block.z++)
    for (block.y = 0; block.y < grid[1]; block.y++)
      for (block.x = 0; block.x < grid[0]; block.x++)
        if (!run_block()) return 2;
  return 0;
}

#include "../genset.cu"
