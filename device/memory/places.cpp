#include "places.h"

#include <memory>
#include <mutex>
#include <new>

enum class PlaceState : uint8_t { ready, taken, idle };

struct ProxycclPlaces {
  uint64_t start, bytes;
  uint32_t count;
  std::unique_ptr<PlaceState[]> states;
  ProxycclPlaces* next;
};

namespace {

std::mutex mutex;  // of everything below, and of all states
ProxycclPlaces* all = nullptr;
thread_local ProxycclPlaces* chosen = nullptr;
uint64_t mark = uint64_t{1} << 63;  // of the next allocation for which no place is left

uint32_t count_of(const ProxycclPlaces& places, PlaceState state) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < places.count; ++i) found += places.states[i] == state;
  return found;
}

}  // namespace

ProxycclPlaces* proxyccl_places_open(uint64_t start, uint64_t bytes, uint32_t count) {
  std::unique_ptr<ProxycclPlaces> places(new (std::nothrow) ProxycclPlaces{start, bytes, count, nullptr, nullptr});
  if (places == nullptr) return nullptr;
  places->states.reset(new (std::nothrow) PlaceState[count]());
  if (places->states == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  places->next = all;
  return all = places.release();
}

void proxyccl_places_choose(ProxycclPlaces* places) { chosen = places; }

uint32_t proxyccl_places_idle(ProxycclPlaces* places) {
  const std::lock_guard<std::mutex> lock(mutex);
  return count_of(*places, PlaceState::idle);
}

void proxyccl_places_renew(ProxycclPlaces* places) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (uint32_t i = 0; i < places->count; ++i)
    if (places->states[i] == PlaceState::idle) places->states[i] = PlaceState::ready;
}

int proxyccl_places_close(ProxycclPlaces* places) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (count_of(*places, PlaceState::taken) != 0) return 0;
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
  while (place < chosen->count && chosen->states[place] != PlaceState::ready) ++place;
  if (place == chosen->count) return reinterpret_cast<void*>(static_cast<uintptr_t>(mark++));
  chosen->states[place] = PlaceState::taken;
  return reinterpret_cast<void*>(static_cast<uintptr_t>(chosen->start + place * chosen->bytes));
}

void proxyccl_place_free(void* ptr, ssize_t, int, void*) {
  const uint64_t address = reinterpret_cast<uintptr_t>(ptr);
  const std::lock_guard<std::mutex> lock(mutex);
  for (ProxycclPlaces* places = all; places != nullptr; places = places->next) {
    if (address < places->start || address >= places->start + places->count * places->bytes) continue;
    places->states[(address - places->start) / places->bytes] = PlaceState::idle;
    return;
  }
}
