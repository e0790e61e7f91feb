/* A fake RDMA device for tests of the verbs transport. Its queue pair executes requests as copies in this process's
 * memory, and records the first violation of a limit. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <stdint.h>

typedef struct FakeDevice FakeDevice;

typedef struct FakeCounts {
  uint64_t posts;            /* calls of post_send */
  uint64_t polls;            /* calls of poll_cq */
  uint64_t requests;         /* posted */
  uint64_t signalled;        /* of them */
  uint64_t inlined;          /* of them */
  uint64_t executed;         /* of them */
  uint64_t longest_chain;    /* largest number of requests in one post */
  uint64_t most_outstanding; /* largest number of requests in the send queue */
  uint64_t reads;            /* executed */
  uint64_t fenced;           /* number of posted requests with a fence */
  uint64_t signals;          /* number of executed atomics and 8-byte inline writes */
} FakeCounts;

typedef struct FakeSignal {
  uint64_t remote;       /* address of the signal word */
  uint64_t value;        /* the word's value after the signal */
  uint64_t bytes_before; /* number of bytes that earlier requests wrote */
} FakeSignal;

/* Opens a device. `reads` is the largest number of outstanding reads, or 0 if the device supports no reads. */
FakeDevice *fake_open(uint32_t send_depth, uint32_t cq_depth, uint32_t reads);
void fake_close(FakeDevice *device);
uintptr_t fake_qp(const FakeDevice *device);
uintptr_t fake_cq(const FakeDevice *device);
uint32_t fake_qp_num(const FakeDevice *device);
/* Lets requests name this memory by `key`. Local memory and the peer's memory have different keys. */
void fake_register(FakeDevice *device, uint32_t key, uintptr_t base, uint64_t bytes);
/* Limits how many more requests are executed. A negative number means no limit, which is the default. */
void fake_allow(FakeDevice *device, int64_t requests);
/* Makes each poll execute a random number of requests, at most `most`. If `most` is 0, each poll executes all
 * allowed requests. */
void fake_dawdle(FakeDevice *device, uint32_t most, uint32_t seed);
/* Makes the request with this number, counted from 1, complete with an ibv_wc_status. This request and the requests
 * after it, `lost` of them in all, are executed nevertheless if they are posted, as if their acknowledgements were
 * lost.
 */
void fake_fail_request(FakeDevice *device, uint64_t number, int status, uint32_t lost);
/* Puts the queue pair into its error state. */
void fake_stop(FakeDevice *device);
/* Resets the queue pair after a failure: discards its requests and completions, and ends its error state. */
void fake_reset(FakeDevice *device);
/* Makes the post with this number, counted from 1, fail with an errno. */
void fake_fail_post(FakeDevice *device, uint64_t number, int error);
/* Makes all polls fail until the queue pair is reset. */
void fake_fail_polls(FakeDevice *device);
/* Returns a description of the first violation of a limit, or NULL. */
const char *fake_breach(FakeDevice *device);
void fake_counts(FakeDevice *device, FakeCounts *counts);
/* Describes the executed signal with this index, counted from 0, in `signal`. Returns 0 if there were fewer signals. */
int fake_signal(FakeDevice *device, uint64_t index, FakeSignal *signal);
/* Returns the name of an ibv_wc_status in verbs.h, or NULL. */
const char *fake_status_name(int status);

#endif
