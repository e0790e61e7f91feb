// Redefines assert() on the host, where libc's would end the process. Run-time compilers have a built-in assert().
#if defined(PROXYCCL_ON_HOST) && PROXYCCL_ON_HOST
#undef assert
#ifdef NDEBUG
#define assert(condition) static_cast<void>(0)
#else
#define assert(condition)                              \
  (static_cast<bool>(condition) ? static_cast<void>(0) \
                                : ::proxyccl::host::failAssertion(#condition, __FILE__, __LINE__))
#endif
#endif
