/* A signal handler that wakes a thread by writing to an eventfd that the thread reads.
 *
 * Python's own signal handlers run in the main thread between two bytecodes, so these handlers do not run while the
 * main thread waits inside a C call. This handler is in C and runs immediately, and any thread may read the eventfd. */
#pragma once

/* Installs a handler of `signal` that adds one to the eventfd and then calls the previous handler, which an MPI library
 * may have installed. Call this function only once in a process. Returns 0 or an errno. */
int proxyccl_wake_signal_install(int signal, int eventfd);
/* Restores the previous handler, unless another handler has replaced the installed handler. */
void proxyccl_wake_signal_remove(int signal);
