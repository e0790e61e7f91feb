// Defines MSCCL++'s atomic operations, which take memory order and scope as arguments.
#pragma once

#include "mscclpp/device.hpp"

namespace mscclpp {

enum MemoryOrder { memoryOrderRelaxed, memoryOrderAcquire, memoryOrderRelease, memoryOrderAcqRel, memoryOrderSeqCst };
enum ThreadScope { scopeSystem, scopeDevice };

/// Loads a number of 4 or 8 bytes.
/// @param p      its address
/// @param order  relaxed, acquire or sequentially consistent
template <class T, ThreadScope Scope = scopeSystem>
PROXYCCL_DEVICE T atomicLoad(const T* p, MemoryOrder order) {
  if (order == memoryOrderRelaxed)
    return Scope == scopeSystem ? proxyccl::loadRelaxedSystem(p) : proxyccl::loadRelaxedDevice(p);
  if (order == memoryOrderSeqCst) proxyccl::fenceSystem();
  return Scope == scopeSystem ? proxyccl::loadAcquireSystem(p) : proxyccl::loadAcquireDevice(p);
}

/// Stores a number of 4 or 8 bytes.
/// @param p      its address
/// @param value  the value to store
/// @param order  relaxed, release or sequentially consistent
template <class T, ThreadScope Scope = scopeSystem>
PROXYCCL_DEVICE void atomicStore(T* p, const proxyccl::Same<T>& value, MemoryOrder order) {
  if (order == memoryOrderRelaxed) {
    if (Scope == scopeSystem)
      proxyccl::storeRelaxedSystem<T>(p, value);
    else
      proxyccl::storeRelaxedDevice<T>(p, value);
    return;
  }
  if (Scope == scopeSystem)
    proxyccl::storeReleaseSystem<T>(p, value);
  else
    proxyccl::storeReleaseDevice<T>(p, value);
  if (order == memoryOrderSeqCst) proxyccl::fenceSystem();
}

/// Adds to an integer atomically.
/// @return the previous value
template <class T, ThreadScope Scope = scopeSystem>
PROXYCCL_DEVICE T atomicFetchAdd(T* p, const proxyccl::Same<T>& value, MemoryOrder order) {
  if (order == memoryOrderRelaxed)
    return Scope == scopeSystem ? PROXYCCL_FETCH_ADD(p, static_cast<T>(value), RELAXED, SYSTEM)
                                : PROXYCCL_FETCH_ADD(p, static_cast<T>(value), RELAXED, DEVICE);
  if (order == memoryOrderSeqCst) proxyccl::fenceSystem();
  return Scope == scopeSystem ? PROXYCCL_FETCH_ADD(p, static_cast<T>(value), ACQ_REL, SYSTEM)
                              : PROXYCCL_FETCH_ADD(p, static_cast<T>(value), ACQ_REL, DEVICE);
}

}  // namespace mscclpp
