// Links the host runtime to old versions of symbols of glibc and libstdc++, so that a wheel built on a new system also
// loads on an old one, from glibc 2.27 on. Include it first: it changes the symbols that headers refer to.
//
// A linker takes the newest version of each symbol. The host runtime needs nothing from the newer versions. Only `make
// wheel` defines PROXYCCL_LINK_OLD_SYMBOLS, because in toolchains that link libstdc++ statically, the symbols have no
// versions.
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
// The version of std::condition_variable::wait() from before GCC 12, which made the waiting thread cancellable.
PROXYCCL_LINK("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE",
              "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
// Without this function, which GCC 11 added, a container that is too large throws std::bad_alloc instead of
// std::bad_array_new_length.
PROXYCCL_LINK("_ZSt28__throw_bad_array_new_lengthv", "_ZSt17__throw_bad_allocv@GLIBCXX_3.4");

// glibc 2.32 added __libc_single_threaded, by which std::shared_ptr omits atomic operations. This runtime has threads,
// so it always needs atomic operations.
#if __has_include(<sys/single_threaded.h>)
#include <sys/single_threaded.h>
static constexpr char proxyccl_single_threaded = 0;
#define __libc_single_threaded proxyccl_single_threaded
#endif

#endif
