#include "wake_signal.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

static int descriptor = -1;
static struct sigaction previous;

static void wake(int signal, siginfo_t *info, void *context) {
  const int kept = errno; /* the errno of the interrupted code, which must not change */
  const uint64_t one = 1;
  /* A write to an eventfd fails only if the eventfd's count would overflow; then the reader has already been woken. */
  const ssize_t written = write(descriptor, &one, sizeof one);
  (void)written;
  errno = kept;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  }
}

int proxyccl_wake_signal_install(int signal, int eventfd) {
  if (sigaction(signal, NULL, &previous) != 0) return errno;
  descriptor = eventfd;
  /* SA_RESTART: the signal does not interrupt system calls of the program's threads. */
  struct sigaction action = {.sa_sigaction = wake, .sa_flags = SA_SIGINFO | SA_RESTART};
  sigemptyset(&action.sa_mask);
  return sigaction(signal, &action, NULL) != 0 ? errno : 0;
}

void proxyccl_wake_signal_remove(int signal) {
  struct sigaction now;
  if (sigaction(signal, NULL, &now) != 0 || (now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != wake) return;
  sigaction(signal, &previous, NULL);
}
