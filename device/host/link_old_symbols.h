// Links the host runtime to old versions of symbols of glibc and libstdc++, so that a wheel built on a new system also
// loads on an old one, from glibc 2.27 on. Include it first: it changes the symbols that headers refer to.
//
// A linker takes the newest version of each symbol. Nothing here needs what is new in those. Only `make wheel` defines
// PROXYCCL_LINK_OLD_SYMBOLS: in a toolchain that links libstdc++ statically, its symbols have no versions.
#pragma once

#include <cstddef>  // defines the libraries' version macros

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

// glibc 2.34 moved these functions from libdl to libc.
PROXYCCL_LINK("dlopen", "dlopen" PROXYCCL_GLIBC_BASE);
PROXYCCL_LINK("dlsym", "dlsym" PROXYCCL_GLIBC_BASE);
PROXYCCL_LINK("dlerror", "dlerror" PROXYCCL_GLIBC_BASE);
PROXYCCL_LINK("dlinfo", "dlinfo" PROXYCCL_GLIBC_DLINFO);
// std::condition_variable::wait(). Since GCC 12 its thread can be cancelled.
PROXYCCL_LINK("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE",
              "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
// A container that is too large throws std::bad_alloc, as before GCC 11, and not std::bad_array_new_length.
PROXYCCL_LINK("_ZSt28__throw_bad_array_new_lengthv", "_ZSt17__throw_bad_allocv@GLIBCXX_3.4");

// Since glibc 2.32, __libc_single_threaded tells std::shared_ptr whether it needs atomic operations. It always does
// here, because the runtime has threads.
#if __has_include(<sys/single_threaded.h>)
#include <sys/single_threaded.h>
static constexpr char proxyccl_single_threaded = 0;
#define __libc_single_threaded proxyccl_single_threaded
#endif

#endif
