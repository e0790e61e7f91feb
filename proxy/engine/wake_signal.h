/* A signal that wakes a thread: the handler writes to a descriptor, which some thread reads.
 *
 * Python's own handlers run in the main thread between two bytecodes, so not while that thread is inside a call that
 * waits. This one is C, and whoever reads the descriptor may be any thread.
 */
#ifndef PROXYCCL_WAKE_SIGNAL_H
#define PROXYCCL_WAKE_SIGNAL_H

/* Has `signal` add one to the eventfd, and then go to the handler that was there before, if there was one: an MPI may
 * have its own. Called once in a process. Returns 0 or an errno. */
int proxyccl_wake_signal_install(int signal, int eventfd);
/* Puts back what was there before, unless somebody has put something else there since. */
void proxyccl_wake_signal_remove(int signal);

#endif
