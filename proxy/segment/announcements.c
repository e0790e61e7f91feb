/* An entry of the table is a sequence lock: a reader that finds a changed version discards the data that it has read,
 * and the writer never waits for readers. */
#include "announcements.h"

void proxyccl_announce(ProxycclAnnouncements *table, uint32_t entry, const char *handle, uint32_t bytes) {
  ProxycclAnnouncement *own = &table->entries[entry];
  /* A version that wraps around skips 0, because 0 marks an entry that was never used. */
  const uint32_t version = own->version + 2 != 0 ? own->version + 2 : 2;
  __atomic_store_n(&own->version, version - 1, __ATOMIC_RELAXED);
  /* Pairing announced-handle, release: no store after this fence becomes visible before the odd version. */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  __atomic_store_n(&own->handle_bytes, bytes, __ATOMIC_RELAXED);
  for (uint32_t i = 0; i < bytes; ++i) __atomic_store_n(&own->handle[i], handle[i], __ATOMIC_RELAXED);
  /* Pairing announced-handle, release: the handle is stored before its version. */
  __atomic_store_n(&own->version, version, __ATOMIC_RELEASE);
  /* Pairing announcement, release: the entry is stored before the count of changes, which peers poll. */
  __atomic_store_n(&table->changes, table->changes + 1, __ATOMIC_RELEASE);
}

void proxyccl_announce_to_proxies(ProxycclAnnouncements *table, uint32_t entry) {
  ProxycclAnnouncement *own = &table->entries[entry];
  __atomic_store_n(&own->for_proxies, own->version, __ATOMIC_RELAXED);
  /* Pairing announcement, release: `for_proxies` is stored before the count of changes, which peers poll. */
  __atomic_store_n(&table->changes, table->changes + 1, __ATOMIC_RELEASE);
}

uint64_t proxyccl_announcement_changes(const ProxycclAnnouncements *table) {
  /* Pairing announcement, acquire: this load of the count comes before the loads of entries. */
  return __atomic_load_n(&table->changes, __ATOMIC_ACQUIRE);
}

uint32_t proxyccl_announcement_changed(const ProxycclAnnouncements *table, uint32_t entry, const uint64_t *handled) {
  for (; entry < PROXYCCL_ANNOUNCEMENTS; ++entry) {
    const ProxycclAnnouncement *theirs = &table->entries[entry];
    const uint64_t for_proxies = __atomic_load_n(&theirs->for_proxies, __ATOMIC_RELAXED);
    if ((for_proxies << 32 | __atomic_load_n(&theirs->version, __ATOMIC_RELAXED)) != handled[entry]) break;
  }
  return entry;
}

uint32_t proxyccl_announcement_read(const ProxycclAnnouncements *table, uint32_t entry, ProxycclAnnouncement *copy) {
  const ProxycclAnnouncement *theirs = &table->entries[entry];
  /* Pairing announced-handle, acquire: this load of the version comes before the loads of the handle. */
  const uint32_t version = __atomic_load_n(&theirs->version, __ATOMIC_ACQUIRE);
  if (version % 2 != 0) return 0;
  copy->version = version;
  copy->for_proxies = __atomic_load_n(&theirs->for_proxies, __ATOMIC_RELAXED);
  copy->handle_bytes = __atomic_load_n(&theirs->handle_bytes, __ATOMIC_RELAXED);
  if (copy->handle_bytes > PROXYCCL_ANNOUNCED_HANDLE_BYTES) return 0;
  for (uint32_t i = 0; i < copy->handle_bytes; ++i)
    copy->handle[i] = __atomic_load_n(&theirs->handle[i], __ATOMIC_RELAXED);
  /* Pairing announced-handle, acquire: a reader that has read a byte of a later handle sees a later version. */
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&theirs->version, __ATOMIC_RELAXED) == version ? version : 0;
}

void proxyccl_announcement_reply(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                 uint64_t address) {
  ProxycclAnnouncementReply *own = &table->replies[entry][peer];
  __atomic_store_n(&own->address, address, __ATOMIC_RELAXED);
  /* Pairing announcement-reply, release: the memory is mapped or unmapped, and the address is stored, before the
   * version is stored. */
  __atomic_store_n(&own->version, version, __ATOMIC_RELEASE);
}

void proxyccl_announcement_reply_memory(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                        uint32_t id) {
  /* Pairing announcement-reply, release: the proxy's table has the memory before the id is stored. */
  __atomic_store_n(&table->replies[entry][peer].memory, (uint64_t)version << 32 | (id + 1), __ATOMIC_RELEASE);
}

int proxyccl_announcement_memory(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t *id) {
  /* Pairing announcement-reply, acquire. */
  const uint64_t memory = __atomic_load_n(&table->replies[entry][peer].memory, __ATOMIC_ACQUIRE);
  *id = (uint32_t)memory - 1;
  return memory >> 32 == table->entries[entry].version;
}

int proxyccl_announcement_reached(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer,
                                  uint64_t *address) {
  const ProxycclAnnouncementReply *theirs = &table->replies[entry][peer];
  /* Pairing announcement-reply, acquire: this load of the version comes before the load of the address. The peer stores
   * another address only after the owner has changed the entry again. */
  const uint64_t version = __atomic_load_n(&theirs->version, __ATOMIC_ACQUIRE);
  *address = __atomic_load_n(&theirs->address, __ATOMIC_RELAXED);
  return version == table->entries[entry].version;
}
