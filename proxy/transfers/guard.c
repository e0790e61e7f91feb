/* Copies by the CPU from and to memory that the program may free, protect or truncate at any moment. See parts.h.
 *
 * Access to memory that has been freed, protected or truncated raises SIGSEGV or SIGBUS. If a guarded copy raised the
 * signal, this file's handler jumps back to the copy; it passes all other signals to the handler that was installed
 * before. process_vm_readv would return an error instead, but it takes 1.6 us longer per copy, and twice as long for a
 * megabyte.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <unistd.h>

#include "parts.h"

enum {
  MOST_REPLACED = 8,
  SMALLEST_PAGE = 4096,
  NEAR = 1 << 16 /* size of the largest page, because a signal may report the page's address, not the byte's */
};

/* A thread's running guarded copy: the point to which the handler jumps back, and the blocks. */
typedef struct GuardedCopy {
  sigjmp_buf back;
  const struct iovec *to, *from;
  uint64_t count;
} GuardedCopy;

/* A thread's running call of a replaced handler: the stack frame of pass_on, and the handler's index in Replaced. */
typedef struct Passing {
  const char *frame;
  int level;
} Passing;

/* The handlers that this file's handler has replaced for one signal, the oldest first. */
typedef struct Replaced {
  struct sigaction actions[MOST_REPLACED];
  int count; /* number of actions; atomic */
} Replaced;

/* These variables need the TLS model initial-exec, because with other models a thread's first access allocates memory,
 * which a signal handler may not do. */
static __thread GuardedCopy *current __attribute__((tls_model("initial-exec")));
static __thread Passing passing __attribute__((tls_model("initial-exec")));
static const int signals[] = {SIGSEGV, SIGBUS};
static Replaced replaced[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int is_near(const struct iovec *blocks, uint64_t count, uintptr_t address) {
  for (uint64_t i = 0; i < count; ++i) {
    const uintptr_t start = (uintptr_t)blocks[i].iov_base;
    if (address + NEAR > start && address < start + blocks[i].iov_len + NEAR) return 1;
  }
  return 0;
}

/* Returns whether the guarded copy caused the signal, either directly or through a later handler that raised the signal
 * again. */
static int is_of(const GuardedCopy *guard, const siginfo_t *info) {
  if (info->si_code <= 0) return info->si_pid == getpid();
  if (info->si_code == SI_KERNEL) return 1; /* the kernel does not report a non-canonical address */
  const uintptr_t address = (uintptr_t)info->si_addr;
  return is_near(guard->to, guard->count, address) || is_near(guard->from, guard->count, address);
}

/* Ends the process as the kernel would if there were no handler. */
static void end_process(int number, const siginfo_t *info) {
  const struct sigaction end = {.sa_handler = SIG_DFL};
  sigaction(number, &end, NULL);
  if (info->si_code <= 0) raise(number); /* a fault needs no `raise`, because it recurs when the handler returns */
}

/* Passes a signal to the newest replaced handler. If the replaced handler calls this file's handler, because it was
 * installed after this file's handler, the nested call passes the signal to the next older handler. */
static void pass_on(int number, siginfo_t *info, void *context) {
  const Replaced *before = &replaced[number == SIGBUS];
  const char *frame = __builtin_frame_address(0);
  const int nested =
      passing.frame != NULL && frame < passing.frame; /* a frame that the program has left by longjmp is not nested */
  const int level = nested ? passing.level - 1 : __atomic_load_n(&before->count, __ATOMIC_ACQUIRE) - 1;
  const struct sigaction *action = &before->actions[level < 0 ? 0 : level];
  const Passing outer = passing;
  passing = (Passing){frame, level};
  if (level >= 0 && (action->sa_flags & SA_SIGINFO) != 0) {
    action->sa_sigaction(number, info, context);
  } else if (level < 0 || action->sa_handler == SIG_DFL || (action->sa_handler == SIG_IGN && info->si_code > 0)) {
    end_process(number, info); /* a fault ends the process even with SIG_IGN, because a fault can't be ignored */
  } else if (action->sa_handler != SIG_IGN) {
    action->sa_handler(number);
  }
  passing = outer;
}

static void handle(int number, siginfo_t *info, void *context) {
  GuardedCopy *guard = current;
  if (guard == NULL || !is_of(guard, info)) {
    const int kept = errno;
    pass_on(number, info, context);
    errno = kept;
    return;
  }
  current = NULL;
  siglongjmp(guard->back, 1);
}

/* Records a replaced action as the newest. If the action is recorded already, the program has restored the action, so
 * later entries are dropped. */
static void note_replaced(Replaced *before, const struct sigaction *action) {
  int count = 0;
  while (count < before->count && before->actions[count].sa_handler != action->sa_handler) ++count;
  if (count == MOST_REPLACED) --count;
  before->actions[count] = *action;
  __atomic_store_n(&before->count, count + 1, __ATOMIC_RELEASE);
}

static void hold(void) { pthread_mutex_lock(&lock); }

static void let_go(void) { pthread_mutex_unlock(&lock); }

/* Makes fork take the lock, because no thread of the child could release a lock that another thread held at the
 * fork. */
__attribute__((constructor)) static void hold_while_forking(void) { pthread_atfork(hold, let_go, let_go); }

int guard_install(void) {
  int error = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 2 && error == 0; ++i) {
    struct sigaction now, own = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&own.sa_mask);
    if (sigaction(signals[i], NULL, &now) != 0) error = errno;
    if (error != 0 || ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle)) continue;
    note_replaced(&replaced[i], &now);
    if (sigaction(signals[i], &own, NULL) != 0) error = errno;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

void guard_admit(sigset_t *blocked) {
  for (int i = 0; i < 2; ++i) sigdelset(blocked, signals[i]);
}

/* Copies blocks. Returns 0 if a byte can't be accessed, else 1. */
static int copy(const struct iovec *to, const struct iovec *from, uint64_t count) {
  GuardedCopy guard;
  guard.to = to;
  guard.from = from;
  guard.count = count;
  if (sigsetjmp(guard.back, 0) != 0) return 0; /* saves no signal mask, because the handler blocks no signals */
  current = &guard;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  for (uint64_t i = 0; i < count; ++i) memmove(to[i].iov_base, from[i].iov_base, from[i].iov_len);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  current = NULL;
  return 1;
}

/* Returns the number of bytes from an address to the end of its page, at most `bytes`. */
static size_t within_page(const char *address, size_t bytes) {
  const size_t rest = SMALLEST_PAGE - (uintptr_t)address % SMALLEST_PAGE;
  return rest < bytes ? rest : bytes;
}

uint64_t guard_copy(const struct iovec *to, const struct iovec *from, uint64_t count, uint64_t bytes) {
  if (copy(to, from, count)) return bytes;
  /* memmove copies in any order, so the fault does not show how many bytes were copied. The loop repeats the copy page
   * by page, because either all bytes of a page are accessible or none is. */
  uint64_t done = 0;
  for (uint64_t i = 0; i < count; ++i) {
    struct iovec there = to[i], here = from[i];
    for (uint64_t left = from[i].iov_len; left > 0; left -= here.iov_len) {
      here.iov_len = there.iov_len = within_page(there.iov_base, within_page(here.iov_base, left));
      if (!copy(&there, &here, 1)) return done;
      there.iov_base = (char *)there.iov_base + here.iov_len;
      here.iov_base = (char *)here.iov_base + here.iov_len;
      done += here.iov_len;
    }
  }
  return done;
}
