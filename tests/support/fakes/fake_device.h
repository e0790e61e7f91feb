/* A device that the tests of the verbs transport post to: a queue pair that executes requests, when allowed to, as
 * copies in this process's memory, and notes the first breach of any limit. */
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
  uint64_t longest_chain;    /* most requests in one call */
  uint64_t most_outstanding; /* requests in the send queue at once */
  uint64_t reads;            /* executed */
  uint64_t fenced;           /* requests with a fence */
  uint64_t signals;          /* writes of 8 inline bytes, and atomics, executed */
} FakeCounts;

typedef struct FakeSignal {
  uint64_t remote;       /* address of the word */
  uint64_t value;        /* that it then held */
  uint64_t bytes_before; /* bytes written by earlier requests */
} FakeSignal;

/* `reads`: 0 if it makes no reads. */
FakeDevice *fake_open(uint32_t send_depth, uint32_t cq_depth, uint32_t reads);
void fake_close(FakeDevice *device);
uintptr_t fake_qp(const FakeDevice *device);
uintptr_t fake_cq(const FakeDevice *device);
uint32_t fake_qp_num(const FakeDevice *device);
/* Memory that requests may name by this key; local memory and the peer's have different keys. */
void fake_register(FakeDevice *device, uint32_t key, uintptr_t base, uint64_t bytes);
/* Requests that may be executed from now on, one at each poll; negative: any number, which is the default. */
void fake_allow(FakeDevice *device, int64_t requests);
/* Executes up to a random number of requests, at most `most`, at each poll. 0: all that are allowed. */
void fake_dawdle(FakeDevice *device, uint32_t most, uint32_t seed);
/* Makes the request with this number, counted from 1, fail with an ibv_wc_status. */
void fake_fail_request(FakeDevice *device, uint64_t number, int status);
/* Makes the post with this number, counted from 1, fail with an errno. */
void fake_fail_post(FakeDevice *device, uint64_t number, int error);
/* Polls fail. */
void fake_fail_polls(FakeDevice *device);
/* Returns the first breach of a limit in words, or NULL. */
const char *fake_breach(FakeDevice *device);
void fake_counts(FakeDevice *device, FakeCounts *counts);
/* The index-th signal executed, from 0. 0 if there were fewer. */
int fake_signal(FakeDevice *device, uint64_t index, FakeSignal *signal);
/* The name of an ibv_wc_status in verbs.h, or NULL. */
const char *fake_status_name(int status);

#endif
