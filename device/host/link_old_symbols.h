// Links the host runtime to old versions of glibc's and libstdc++'s symbols, so that a wheel built on a new system also
// loads on old systems with glibc 2.27 or later. Include this header before all others.
//
// If another header came first, the linker would take the newest versions. Only `make wheel` defines
// PROXYCCL_LINK_OLD_SYMBOLS, because a static libstdc++ has no symbol versions.
#pragma once

#include <cstddef>  // defines __GLIBC__ and __GLIBCXX__

#if defined(PROXYCCL_LINK_OLD_SYMBOLS) && defined(__GLIBC__) && defined(__GLIBCXX__) && \
    (defined(__x86_64__) || defined(__aarch64__))

#define PROXYCCL_LINK(name, old) __asm__(".symver " name "," old)
#if defined(__x86_64__)
#define PROXYCCL_GLIBC_BASE "@GLIBC_2.2.5"
#define PROXYCCL_GLIBC_DLINFO "@GLIBC_2.3.3"
#else
#define PROXYCCL_GLIBC_BASE "@GLIBC_2.17"
#define PROXYCCL_GLIBC_DLINFO PROXYCCL_GLIBC_BASE
#endif

// glibc 2.34 moved the dl functions from libdl to libc.
PROXYCCL_LINK("dlopen", "dlopen" PROXYCCL_GLIBC_BASE);
PROXYCCL_LINK("dlsym", "dlsym" PROXYCCL_GLIBC_BASE);
PROXYCCL_LINK("dlerror", "dlerror" PROXYCCL_GLIBC_BASE);
PROXYCCL_LINK("dlinfo", "dlinfo" PROXYCCL_GLIBC_DLINFO);
// GCC 12 added a version of std::condition_variable::wait() in which a thread can be cancelled.
PROXYCCL_LINK("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE",
              "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
// Without this function, which GCC 11 added, a container that is too large throws std::bad_alloc instead of
// std::bad_array_new_length.
PROXYCCL_LINK("_ZSt28__throw_bad_array_new_lengthv", "_ZSt17__throw_bad_allocv@GLIBCXX_3.4");

// glibc 2.32 added __libc_single_threaded, which makes std::shared_ptr non-atomic in processes with one thread. This
// runtime has threads, so the constant 0 replaces it.
#if __has_include(<sys/single_threaded.h>)
#include <sys/single_threaded.h>
static constexpr char proxyccl_single_threaded = 0;
#define __libc_single_threaded proxyccl_single_threaded
#endif

#endif
