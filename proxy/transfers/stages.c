/* Implements stages: pinned buffers through which an agent serves requests for a device's memory.
 *
 * The agent's thread queues a frame's copies and later polls for their end, so the device copies one frame while the
 * socket carries another.
 */
#include "clock.h"
#include "parts.h"

static uint32_t free_number(const Device *device) {
  uint32_t number = 0;
  while (number < PROXYCCL_STAGES && device->taken[number]) ++number;
  return number;
}

Stage *stage_take(ProxycclLink *link, Device *device) {
  Stage *stage = calloc(1, sizeof *stage);
  if (stage == NULL) return NULL;
  stage->number = free_number(device);
  stage->agent = link->agent;
  stage->device = device;
  stage->link = link;
  if (stage->number < PROXYCCL_STAGES) {
    stage->memory = (char *)(uintptr_t)device->staging->memory[stage->number];
    device->taken[stage->number] = 1;
  } else if ((stage->memory = malloc(PROXYCCL_STAGE_BYTES)) == NULL) {
    free(stage);
    return NULL;
  }
  return stage;
}

Stage *stage_take_pinned(ProxycclLink *link, Device *device) {
  Stage *stage = free_number(device) < PROXYCCL_STAGES ? stage_take(link, device) : NULL;
  if (stage == NULL) link->agent->starved = 1;
  return stage;
}

static void feed(ProxycclAgent *agent) {
  agent->feeds = 1;
  agent_wake(agent);
}

static void free_stage(Stage *stage) {
  if (stage->number < PROXYCCL_STAGES) {
    stage->device->taken[stage->number] = 0;
    if (stage->agent->starved) feed(stage->agent);
  } else {
    free(stage->memory);
  }
  free(stage);
}

void stage_give(Stage *stage) {
  stage->link = NULL;
  if (!stage->copying) free_stage(stage);
}

/* Ends a stage's copy by libfabric: records the copy's result, and wakes the agent's thread, which then begins the next
 * step of the link's answer. */
static void carried(Rdma *rdma) {
  Stage *stage = (Stage *)((char *)rdma - offsetof(Stage, rdma));
  if (rdma->error != 0 || rdma->canceled || rdma->link->lost != NULL) stage->status = -1;
  stage->copying = 0;
  --rdma->link->references;
  if (stage->link == NULL) {
    agent_wake(stage->agent); /* the thread may now free the link */
    free_stage(stage);
  } else {
    feed(stage->agent); /* only the agent's thread serves links */
  }
}

void stage_carry(Stage *stage, int writes, uint64_t bytes, const Origin *origin) {
  const uint64_t row[ROW] = {(uintptr_t)stage->memory, origin->address, bytes, 0};
  memcpy(stage->row, row, sizeof row);
  row_add_rails(stage->row, stage->link, stage->device->staging, origin->keys);
  stage->copying = 1;
  ++stage->link->references;
  stage->rdma = (Rdma){.link = stage->link, .writes = writes, .rows = stage->row, .ended = carried};
  rdma_start(&stage->rdma, bytes);
}

void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count) {
  ProxycclAgent *agent = stage->link->agent;
  const ProxycclStaging *staging = stage->device->staging;
  stage->copying = 1;
  stage->turn = ++agent->turns;
  queue_push(&agent->stages, stage);
  pthread_mutex_unlock(&agent->lock);
  uint64_t bytes = 0;
  for (uint64_t i = 0; i < count; ++i) bytes += blocks[i].iov_len;
  stage->status = staging_queue(staging, stage->number, stage->memory, to_device, blocks, count);
  const uint64_t deadline = now_ns() + SHORT_NS;
  while (bytes <= SHORT_BYTES && now_ns() < deadline &&
         staging_await(staging, stage->number, 0) == PROXYCCL_RUNTIME_NOT_READY) {}
  if (stage->number == PROXYCCL_STAGES) { /* waits, because all copies of pageable memory share one event */
    const int ended = staging_await(staging, stage->number, LONGEST_CANCEL_NS);
    if (stage->status == 0) stage->status = ended;
  }
  pthread_mutex_lock(&agent->lock);
}

void stages_look(ProxycclAgent *agent) {
  for (Node *each = agent->stages.first, *next; each != NULL; each = next) {
    Stage *stage = (Stage *)each;
    int status = 0;
    if (stage->number < PROXYCCL_STAGES) {
      pthread_mutex_unlock(&agent->lock);
      status = staging_await(stage->device->staging, stage->number, 0);
      pthread_mutex_lock(&agent->lock);
    }
    next = each->next; /* only this thread adds and removes stages */
    if (status == PROXYCCL_RUNTIME_NOT_READY) continue;
    if (stage->status == 0) stage->status = status;
    queue_remove(&agent->stages, stage);
    stage->copying = 0;
    pthread_cond_broadcast(&agent->changed);
    if (stage->link == NULL) {
      free_stage(stage);
    } else {
      agent->feeds = 1; /* the stage's answer may be ready to be sent */
    }
  }
}

/* Frees the stages, all of which belonged to lost links. */
void stages_finish(ProxycclAgent *agent) {
  for (Stage *stage; (stage = queue_pop(&agent->stages)) != NULL; free_stage(stage)) {
    if (stage->number < PROXYCCL_STAGES) staging_await(stage->device->staging, stage->number, LONGEST_CANCEL_NS);
  }
}
