/* Stages: pinned memory by way of which an agent serves requests for a device's memory. See transfers.h and parts.h.
 *
 * The agent's thread queues the copies of one frame, and looks later whether they are done, so the socket carries one
 * frame meanwhile and the device copies another.
 */
#include "clock.h"
#include "parts.h"
#include "runtime_table.h"

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

void stage_carried(ProxycclTransfer *request) {
  Stage *stage = request->served;
  stage->copying = 0;
  if (request->state != PROXYCCL_TRANSFER_DONE) stage->status = -1;
  transfer_free(request);
  if (stage->link == NULL) {
    free_stage(stage);
  } else {
    feed(stage->agent); /* not from here: a caller may have ended it, and only the thread serves */
  }
}

void stages_feed(ProxycclAgent *agent) {
  agent->feeds = agent->starved = 0;
  for (ProxycclLink *link = agent->links; link != NULL; link = link->next) {
    if (link->answer != NULL) link_send(link);
  }
}

void stage_copy(Stage *stage, int to_device, const struct iovec *blocks, uint64_t count) {
  ProxycclAgent *agent = stage->link->agent;
  const ProxycclStaging *staging = stage->device->staging;
  stage->copying = 1;
  stage->turn = ++agent->turns;
  stage->next = NULL;
  *agent->last_stage = stage;
  agent->last_stage = &stage->next;
  pthread_mutex_unlock(&agent->lock);
  uint64_t bytes = 0;
  for (uint64_t i = 0; i < count; ++i) bytes += blocks[i].iov_len;
  stage->status = device_queue(staging, stage->number, stage->memory, to_device, blocks, count);
  const uint64_t deadline = now_ns() + SHORT_NS;
  while (bytes <= SHORT_BYTES && now_ns() < deadline &&
         device_reached(staging, stage->number) == PROXYCCL_RUNTIME_NOT_READY) {}
  if (stage->number == PROXYCCL_STAGES) { /* the event is for one such copy at a time */
    const int ended = device_await(staging, stage->number);
    if (stage->status == 0) stage->status = ended;
  }
  pthread_mutex_lock(&agent->lock);
}

void stages_look(ProxycclAgent *agent) {
  Stage **at = &agent->stages;
  while (*at != NULL) {
    Stage *stage = *at;
    int status = 0;
    if (stage->number < PROXYCCL_STAGES) {
      pthread_mutex_unlock(&agent->lock);
      status = device_reached(stage->device->staging, stage->number);
      pthread_mutex_lock(&agent->lock);
    }
    if (status == PROXYCCL_RUNTIME_NOT_READY) {
      at = &stage->next;
      continue;
    }
    if (stage->status == 0) stage->status = status;
    *at = stage->next;
    if (agent->last_stage == &stage->next) agent->last_stage = at;
    stage->copying = 0;
    pthread_cond_broadcast(&agent->changed);
    if (stage->link == NULL) {
      free_stage(stage);
    } else {
      link_send(stage->link); /* its answer may go; it may queue more copies, at the end */
    }
  }
}

void stages_finish(ProxycclAgent *agent) {
  while (agent->stages != NULL) {
    Stage *stage = agent->stages;
    if (stage->number < PROXYCCL_STAGES) device_await(stage->device->staging, stage->number);
    agent->stages = stage->next;
    free_stage(stage); /* the links are lost */
  }
  agent->last_stage = &agent->stages;
}
