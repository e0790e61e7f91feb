/* Implements threads that run workers in a loop, with their idle policies and their helpers. See engine.h.
 *
 * Only the thread that holds the lock `turn` runs the workers. The proxy thread releases the lock while it backs off
 * after a round (in which each worker runs once) without work. The proxy thread still holds the lock after
 * proxyccl_thread_run has returned, so no helper runs workers while Python calls a handler or handles an exit. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "clock.h"
#include "waking.h"
#include "worker.h"

enum {
  POLLS_PER_CLOCK = 16, /* rounds without work per reading of the clock; a reading takes as long as several rounds */
  SLEEP_PART = 32,      /* an idle thread sleeps for 1/32 of the time that it has been idle */
  REST_PART = 1024, /* after a long idle time, a thread sleeps for 1/1024 of that time, even beyond its policy's longest
                       sleep */
  LONGEST_REST_NS = 10000000,
  OUTSTANDING_SLEEP_NS = 50000, /* longest and shortest sleep while work is outstanding: a program may wait for the
                                   work, and waking takes a large part of this time */
  TIMER_SLACK_NS = 1000,        /* the system may end a sleep this much later; the system's default is 50 µs */
  TURN_SLEEP_NS = 50000,        /* sleep between two attempts to take the lock `turn` from a helper */
  SPIN_NS = 50000 /* longest spin, because a spin may delay other threads of the core by a whole time slice */
};

enum { HELPED_IDLY = 1, HELPED_ON = 2 }; /* a helper ran the workers without progress (IDLY) or with progress (ON) */

#define IDLE_FOR_LONG UINT64_MAX /* an idle time so long that back_off() chooses the policy's longest sleep */

#define NO_CONTEXT UINTPTR_MAX /* not 0, because 0 is a valid context in HIP, where contexts are device numbers */

struct ProxycclThread {
  ProxycclIdlePolicy idle;     /* relaxed: the fields are independent */
  uint32_t *asleep;            /* 1 while the thread sleeps and may be woken (waking.h) */
  int woken;                   /* whether a launch ended the last sleep */
  ProxycclWorker *added;       /* a stack: any thread pushes, this thread pops all */
  ProxycclWorker *first, **at; /* the list of workers, and the link to the worker to run next */
  uintptr_t context;           /* the device context that is current in the thread */
  void (*end_help)(void *);    /* NULL if no other thread may run the workers */
  int turn;                    /* pairing turn: a lock; 1 while a thread holds it */
  int helped;                  /* HELPED_… flags since the thread's last check */
  ProxycclOutcome found;       /* the outcome of a helper's round; proxyccl_thread_run returns it later */
  ProxycclExitInfo found_info; /* the details of the outcome `found` */
};

/* Pairing new-worker, release: the thread sees everything that was stored in the worker before it was added. */
static void push_added(ProxycclThread *thread, ProxycclWorker *worker) {
  worker->next = __atomic_load_n(&thread->added, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&thread->added, &worker->next, worker, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
}

/* Pairing new-worker, acquire. Takes all added workers. The first load avoids the exchange if no worker was added. */
static ProxycclWorker *pop_added(ProxycclThread *thread) {
  if (__atomic_load_n(&thread->added, __ATOMIC_RELAXED) == NULL) return NULL;
  return __atomic_exchange_n(&thread->added, NULL, __ATOMIC_ACQUIRE);
}

ProxycclThread *proxyccl_thread_create(const ProxycclIdlePolicy *idle, uint32_t *asleep) {
  ProxycclThread *thread = calloc(1, sizeof *thread);
  if (thread == NULL) return NULL;
  proxyccl_thread_set_idle(thread, idle);
  thread->asleep = asleep;
  thread->at = &thread->first;
  thread->context = NO_CONTEXT;
  thread->turn = 1;
  thread->found = CONTINUE;
  return thread;
}

void proxyccl_thread_destroy(ProxycclThread *thread) {
  if (thread->end_help != NULL) thread->end_help(thread);
  free(thread);
}

void proxyccl_thread_set_idle(ProxycclThread *thread, const ProxycclIdlePolicy *idle) {
  counter_set(&thread->idle.spin_ns, idle->spin_ns);
  counter_set(&thread->idle.yield_ns, idle->yield_ns);
  counter_set(&thread->idle.max_sleep_ns, idle->max_sleep_ns);
}

static ProxycclIdlePolicy idle_of(const ProxycclThread *thread) {
  return (ProxycclIdlePolicy){__atomic_load_n(&thread->idle.spin_ns, __ATOMIC_RELAXED),
                              __atomic_load_n(&thread->idle.yield_ns, __ATOMIC_RELAXED),
                              __atomic_load_n(&thread->idle.max_sleep_ns, __ATOMIC_RELAXED)};
}

void proxyccl_thread_add_worker(ProxycclThread *thread, ProxycclWorker *worker) {
  worker->asleep = thread->asleep;
  push_added(thread, worker);
  proxyccl_wake_one(thread->asleep);
}

static struct timespec timespec_of(uint64_t ns) {
  return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

static void sleep_for(uint64_t ns) {
  const struct timespec pause = timespec_of(ns);
  nanosleep(&pause, NULL);
}

/* Sleeps for at most `ns`. Returns 1 if another thread woke this thread before the time had passed. */
static int sleep_until_woken(uint32_t *asleep, uint64_t ns) {
  const struct timespec longest = timespec_of(ns);
  __atomic_store_n(asleep, 1, __ATOMIC_RELAXED); /* a hint: see waking.h */
  syscall(SYS_futex, asleep, FUTEX_WAIT, 1, &longest, NULL, 0);
  return __atomic_exchange_n(asleep, 0, __ATOMIC_RELAXED) == 0;
}

/* Limits how long a thread without work sleeps. */
typedef enum {
  NOTHING_OUTSTANDING,
  OUTSTANDING, /* a program may be waiting for the outstanding work */
  HELPED       /* helpers run the workers, so launches do not wake this thread, which would take a core from a helper */
} Idleness;

/* Depending on the idle time, returns immediately (a spin), yields the core, or sleeps for a fixed part of the idle
 * time. Returns the time slept in ns. */
static uint64_t back_off(ProxycclThread *thread, uint64_t idle_ns, Idleness idleness) {
  const ProxycclIdlePolicy policy = idle_of(thread);
  thread->woken = 0;
  if (idle_ns < policy.spin_ns && idle_ns < SPIN_NS) {
    return 0;
  } else if (idle_ns < policy.spin_ns + policy.yield_ns ||
             (idleness == OUTSTANDING && idle_ns / SLEEP_PART < OUTSTANDING_SLEEP_NS)) {
    sched_yield();
    return 0;
  } else {
    const uint64_t begin_ns = now_ns();
    uint64_t sleep_ns = idle_ns / SLEEP_PART;
    if (sleep_ns > policy.max_sleep_ns) sleep_ns = policy.max_sleep_ns;
    if (idleness == OUTSTANDING && sleep_ns > OUTSTANDING_SLEEP_NS) sleep_ns = OUTSTANDING_SLEEP_NS;
    if (idleness == NOTHING_OUTSTANDING && sleep_ns < idle_ns / REST_PART)
      sleep_ns = idle_ns / REST_PART < LONGEST_REST_NS ? idle_ns / REST_PART : LONGEST_REST_NS;
    if (idleness == HELPED)
      sleep_for(sleep_ns);
    else
      thread->woken = sleep_until_woken(thread->asleep, sleep_ns);
    return now_ns() - begin_ns;
  }
}

static void count_idle(ProxycclThread *thread, uint64_t idle_ns, uint64_t slept_ns) {
  for (ProxycclWorker *worker = thread->first; worker != NULL; worker = worker->next) {
    counter_add(&worker->stats->idle_ns, idle_ns);
    if (slept_ns == 0) continue;
    counter_add(&worker->stats->sleeps, 1);
    counter_add(&worker->stats->slept_ns, slept_ns);
    counter_add(&worker->stats->wakes, (uint64_t)thread->woken);
  }
}

static void take_added(ProxycclThread *thread) {
  ProxycclWorker *added = pop_added(thread);
  if (added == NULL) return;
  while (added != NULL) {
    ProxycclWorker *worker = added;
    added = worker->next;
    worker->next = thread->first;
    thread->first = worker;
  }
  thread->at = &thread->first;
}

/* Makes a worker's context current, unless it is current already. Returns 0 or the driver's status. */
static int enter_context(ProxycclThread *thread, const ProxycclWorker *worker) {
  if (worker->make_current == NULL || worker->context == thread->context) return 0;
  const int status = worker->make_current(worker->context);
  thread->context = status == 0 ? worker->context : NO_CONTEXT;
  return status;
}

static void count_turn(ProxycclWorker *worker) {
  if (worker->service->words != NULL) counter_add(&worker->service->words->turns[worker->number].count, 1);
}

static void end_turns(ProxycclWorker *worker) {
  if (worker->service->words != NULL)
    counter_set(&worker->service->words->turns[worker->number].count, PROXYCCL_NO_MORE_TURNS);
}

/* The results of one round: whether the workers made progress, whether they took triggers or advanced schedules, and
 * whether work is outstanding. */
typedef struct {
  int progress, busy, outstanding;
} Round;

/* Runs a worker once: advances a schedule, executes up to POLL_INTERVAL triggers of each ring, and polls the
 * connections. A trigger for a handler ends the call before the poll. So the first call after a handler skips the
 * rings; otherwise a series of such triggers would prevent polls of the connections. Returns CONTINUE, or the reason
 * why proxyccl_thread_run must return. */
static ProxycclOutcome take_turn(ProxycclThread *thread, ProxycclWorker *worker, ProxycclExitInfo *info, Round *round) {
  const uint32_t rings = list_count(&worker->ring_count);
  const uint32_t drain = request_asked(&worker->drain), pause = request_asked(&worker->pause);
  const int stop = flags_load(&worker->stop);
  uint32_t done = (uint32_t)worker->handled;
  int held = 0, outstanding, running = 0;
  count_turn(worker);
  /* The abort word is checked before any trigger is taken, because triggers after an abort may name freed memory, or
   * carry garbage from a stopped kernel. */
  if (abort_is_up(worker->service->control)) {
    proxyccl_worker_show_schedule_waits(worker);
    /* The abort word is set before streams stop waiting, so a caller that checks for failures once its stream is done
     * finds this failure. */
    proxyccl_schedule_words_end_waits(worker->service->words);
    return PROXYCCL_EXIT_ABORTED;
  }
  if (stop & STOP_AT_ONCE) return PROXYCCL_EXIT_ABORTED;
  request_answer(&worker->pause, pause);
  if (pause & 1) return CONTINUE;
  const int status = enter_context(thread, worker);
  if (status != 0) return exit_with_error(info, PROXYCCL_ERROR_TRANSPORT, status, "making the device current");
  const ProxycclOutcome of_schedule = proxyccl_worker_run_schedule(worker, info, &done, &running);
  if (of_schedule != CONTINUE) return of_schedule;
  for (uint32_t visited = worker->handled ? rings : 0; visited < rings; ++visited) {
    const ProxycclOutcome result =
        proxyccl_worker_visit_ring(worker, &worker->rings[worker->current], info, &done, &held);
    if (result != CONTINUE) return result;
    worker->current = (worker->current + 1) % rings;
  }

  const int took = done != 0;
  worker->handled = 0;
  const ProxycclOutcome result = proxyccl_worker_poll(worker, info, &done, &outstanding);
  if (result != CONTINUE) return result;
  round->progress |= done != 0;
  round->busy |= took;
  round->outstanding |= outstanding | running;
  if (!took && !outstanding && !held && !running) {
    request_answer(&worker->drain, drain);
    if (stop) return PROXYCCL_EXIT_STOPPED;
  }
  return CONTINUE;
}

/* Runs each worker once. The caller must hold the lock `turn`. Returns CONTINUE, or the reason why proxyccl_thread_run
 * must return. */
static ProxycclOutcome run_round(ProxycclThread *thread, Round *round, ProxycclExitInfo *info) {
  do {
    ProxycclWorker *worker = *thread->at;
    const ProxycclOutcome result = take_turn(thread, worker, info, round);
    if (result != CONTINUE) {
      info->worker = worker;
      if (result != PROXYCCL_EXIT_HANDLER) {
        *thread->at = worker->next;
        end_turns(worker);
      }
      if (*thread->at == NULL) thread->at = &thread->first;
      return result;
    }
    thread->at = worker->next != NULL ? &worker->next : &thread->first;
  } while (thread->at != &thread->first);
  return CONTINUE;
}

static void clear_info(ProxycclExitInfo *info) {
  memset(info, 0, sizeof *info);
  info->channel = PROXYCCL_MAX_CHANNELS;
}

static int help(void *thread, int waits) { return proxyccl_thread_help(thread, waits); }

void proxyccl_thread_take_help(ProxycclThread *thread, void (*add)(int (*help)(void *thread, int waits), void *thread),
                               void (*remove)(void *thread)) {
  thread->end_help = remove;
  add(help, thread);
}

/* Returns 1 if a worker's ring has a trigger. The caller must hold the lock `turn`. */
static int any_pushed(const ProxycclThread *thread) {
  ProxycclTrigger trigger;
  for (const ProxycclWorker *worker = thread->first; worker != NULL; worker = worker->next) {
    const uint32_t rings = list_count(&worker->ring_count);
    for (uint32_t i = 0; i < rings; ++i)
      if (ring_peek(&worker->rings[i], &trigger)) return 1;
  }
  return 0;
}

int proxyccl_thread_help(ProxycclThread *thread, int waits) {
  Round round = {0};
  if (!turn_taken(&thread->turn)) return 0;
  if (thread->found == CONTINUE && thread->first != NULL && (waits || any_pushed(thread))) {
    clear_info(&thread->found_info);
    thread->found = run_round(thread, &round, &thread->found_info);
    thread->helped |= round.progress ? HELPED_ON : HELPED_IDLY;
  }
  turn_give(&thread->turn);
  return round.progress;
}

/* Takes the lock `turn` again. The loop takes little time, because a helper holds the lock for at most one round. */
static void take_back(ProxycclThread *thread) {
  while (!turn_taken(&thread->turn)) sleep_for(TURN_SLEEP_NS);
}

/* Backs off after a round without work. If the thread has helpers, releases the lock `turn` during the back-off.
 * Returns the time slept in ns. */
static uint64_t rest(ProxycclThread *thread, uint64_t idle_ns, Idleness idleness) {
  if (thread->end_help == NULL) return back_off(thread, idle_ns, idleness);
  turn_give(&thread->turn);
  const uint64_t slept = back_off(thread, idle_ns, idleness);
  take_back(thread);
  return slept;
}

ProxycclOutcome proxyccl_thread_run(ProxycclThread *thread, ProxycclExitInfo *info) {
  /* 1 if a helper has run the workers and this thread has found no triggers or steps afterwards. This thread then
   * leaves the work to helpers, because a thread that wakes up may take a core from a thread with work. */
  int is_helped = 0;
  uint64_t idle_since = 0, counted = 0; /* start of the idle time; end of the idle time in the statistics */
  uint64_t slept = 0;                   /* length of the last sleep; if it is not 0, the thread polls only once before
                                           it sleeps again */
  uint32_t polls = 0;
  prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0); /* if the call fails, the only effect is longer sleeps */
  clear_info(info);
  for (;;) {
    Round round = {0};
    const int helped = thread->helped;
    thread->helped = 0;
    if (thread->found != CONTINUE) {
      const ProxycclOutcome found = thread->found;
      *info = thread->found_info;
      thread->found = CONTINUE;
      return found;
    }
    take_added(thread);
    if (thread->first == NULL) return PROXYCCL_EXIT_NO_WORKERS;
    const ProxycclOutcome result = run_round(thread, &round, info);
    if (result != CONTINUE) return result;
    is_helped = (is_helped || helped) && !round.busy;
    if (round.progress || helped & HELPED_ON) {
      idle_since = slept = 0;
      if (round.busy) continue;
    }
    if (idle_since == 0) idle_since = counted = now_ns();
    if (is_helped || slept || ++polls % POLLS_PER_CLOCK == 0) {
      const uint64_t now = now_ns(), idle_ns = is_helped ? IDLE_FOR_LONG : now - idle_since;
      /* A helper that has run the workers since the last round also polls for outstanding work. */
      const Idleness idleness = is_helped && (helped || !round.outstanding) ? HELPED
                                : round.outstanding                         ? OUTSTANDING
                                                                            : NOTHING_OUTSTANDING;
      slept = rest(thread, idle_ns, idleness);
      if (!(thread->helped & HELPED_ON)) count_idle(thread, now + slept - counted, slept);
      counted = now + slept;
      if (thread->woken) idle_since = slept = 0; /* another thread wakes this thread to announce work */
    }
  }
}
