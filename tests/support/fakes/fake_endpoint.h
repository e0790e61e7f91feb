/* A fake libfabric endpoint, for tests of the fabric transport. The endpoint copies within this process's memory, and
 * checks and counts its requests. */
#ifndef FAKE_ENDPOINT_H
#define FAKE_ENDPOINT_H

#include <stdint.h>

typedef struct FakeEndpoint FakeEndpoint;

typedef struct {
  uint64_t requests, empty, joined, executed, awaited, refused, polls, reads, signals, bytes;
} FakeFabricCounts;

typedef struct {
  uint64_t remote, value, bytes_before;
} FakeFabricSignal;

/* If `depth` requests are outstanding, further requests are refused with -FI_EAGAIN. If `ordered`, writes keep their
 * order. If `joined`, a write may have two parts, which are executed in order and have at most `max_message` bytes
 * together. */
FakeEndpoint *fake_endpoint_open(uint32_t depth, uint32_t ordered, uint32_t joined, uint64_t max_message);
void fake_endpoint_close(FakeEndpoint *endpoint);
uintptr_t fake_endpoint_fid(FakeEndpoint *endpoint);
uintptr_t fake_endpoint_queue(FakeEndpoint *endpoint);
const char *fake_endpoint_breach(const FakeEndpoint *endpoint);
void fake_endpoint_counts(FakeEndpoint *endpoint, FakeFabricCounts *counts);
/* Registers local memory under its descriptor, or the peer's memory under its key. If `offsets`, requests name the
 * memory by offset from 0. */
void fake_endpoint_register(FakeEndpoint *endpoint, uint64_t key, uint64_t base, uint64_t bytes, uint32_t offsets);
void fake_endpoint_allow(FakeEndpoint *endpoint, int64_t requests);
void fake_endpoint_dawdle(FakeEndpoint *endpoint, uint32_t most, uint32_t seed);
void fake_endpoint_fail(FakeEndpoint *endpoint, uint64_t request, int32_t error);
/* Discards all outstanding requests and completions, and accepts no requests until fake_endpoint_reopen. Always
 * succeeds. */
int fake_endpoint_stop(FakeEndpoint *endpoint);
void fake_endpoint_reopen(FakeEndpoint *endpoint);
int fake_endpoint_signal(FakeEndpoint *endpoint, uint64_t number, FakeFabricSignal *signal);

#endif
