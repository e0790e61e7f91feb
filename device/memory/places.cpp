#include "places.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

struct ProxycclPlaces {
  uint64_t start, bytes;
  uint32_t count;
  std::unique_ptr<uint64_t[]> states;  // kReady, kTaken, or for an idle place the number of the free that made it idle
  ProxycclPlaces* next;
};

namespace {

constexpr uint64_t kReady = 0, kTaken = ~uint64_t{0};

std::mutex mutex;  // guards the variables below, except `chosen`, and all states
ProxycclPlaces* all = nullptr;
thread_local ProxycclPlaces* chosen = nullptr;
uint64_t mark = uint64_t{1} << 63;  // the address for the next allocation if no place is left
uint64_t freed = 0;                 // the number of frees so far

}  // namespace

ProxycclPlaces* proxyccl_places_open(uint64_t start, uint64_t bytes, uint32_t count) {
  std::unique_ptr<ProxycclPlaces> places(new (std::nothrow) ProxycclPlaces{start, bytes, count, nullptr, nullptr});
  if (places == nullptr) return nullptr;
  places->states.reset(new (std::nothrow) uint64_t[count]());
  if (places->states == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  places->next = all;
  return all = places.release();
}

void proxyccl_places_choose(ProxycclPlaces* places) { chosen = places; }

uint64_t proxyccl_places_idle(ProxycclPlaces* places) {
  const std::lock_guard<std::mutex> lock(mutex);
  uint64_t last = 0;
  for (uint32_t i = 0; i < places->count; ++i)
    if (places->states[i] != kTaken) last = std::max(last, places->states[i]);
  return last;
}

void proxyccl_places_renew(ProxycclPlaces* places, uint64_t last) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (uint32_t i = 0; i < places->count; ++i)
    if (places->states[i] <= last) places->states[i] = kReady;
}

int proxyccl_places_close(ProxycclPlaces* places) {
  const std::lock_guard<std::mutex> lock(mutex);
  const uint64_t *begin = places->states.get(), *end = begin + places->count;
  if (std::find(begin, end, kTaken) != end) return 0;
  ProxycclPlaces** link = &all;
  while (*link != places) link = &(*link)->next;
  *link = places->next;
  delete places;
  return 1;
}

void* proxyccl_place_allocate(ssize_t bytes, int, void*) {
  if (chosen == nullptr || bytes <= 0 || static_cast<uint64_t>(bytes) > chosen->bytes) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  uint32_t place = 0;
  while (place < chosen->count && chosen->states[place] != kReady) ++place;
  if (place == chosen->count) return reinterpret_cast<void*>(static_cast<uintptr_t>(mark++));
  chosen->states[place] = kTaken;
  return reinterpret_cast<void*>(static_cast<uintptr_t>(chosen->start + place * chosen->bytes));
}

void proxyccl_place_free(void* ptr, ssize_t, int, void*) {
  const uint64_t address = reinterpret_cast<uintptr_t>(ptr);
  const std::lock_guard<std::mutex> lock(mutex);
  for (ProxycclPlaces* places = all; places != nullptr; places = places->next) {
    if (address < places->start || address >= places->start + places->count * places->bytes) continue;
    places->states[(address - places->start) / places->bytes] = ++freed;
    return;
  }
}
