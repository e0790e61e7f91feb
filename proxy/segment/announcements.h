/* Announcements: memory of a rank that the other ranks of its host may map, and the address at which each of them did.
 *
 * Each rank has one table, in memory that all ranks of the host map. Its owner announces memory and withdraws it. Each
 * peer maps or unmaps what changed, and replies with the address at which its kernels reach the memory. If the owner
 * asks for it, the peer also replies with the id by which its proxy knows the memory. A reply names the version that it
 * answers, so a late one does not concern the memory that took its place.
 */
#ifndef PROXYCCL_ANNOUNCEMENTS_H
#define PROXYCCL_ANNOUNCEMENTS_H

#include <stdint.h>

enum {
  PROXYCCL_ANNOUNCEMENTS = 512,
  PROXYCCL_ANNOUNCED_HANDLE_BYTES = 244, /* the longest handle */
  PROXYCCL_ANNOUNCEMENT_PEERS = 72       /* most ranks of a host */
};

/* A reply's address if the peer's kernels can't reach the memory. */
#define PROXYCCL_UNREACHED 1ull
/* A reply's memory id if the peer's proxy can't register the memory. */
#define PROXYCCL_NO_MEMORY 0xfffffffeu

typedef struct ProxycclAnnouncement {
  uint32_t version;      /* counts up twice for each change; odd while the handle is being written; 0: never used */
  uint32_t handle_bytes; /* 0: withdrawn */
  uint32_t for_proxies;  /* the version that the owner wants proxies to register */
  char handle[PROXYCCL_ANNOUNCED_HANDLE_BYTES];
} ProxycclAnnouncement;

typedef struct ProxycclAnnouncementReply {
  uint64_t version; /* of the announcement that it answers */
  uint64_t address;
  uint64_t memory; /* in the upper half the version, in the lower one more than the id; 0: nothing was replied */
} ProxycclAnnouncementReply;

typedef struct ProxycclAnnouncements {
  uint64_t changes; /* counts up after each change */
  ProxycclAnnouncement entries[PROXYCCL_ANNOUNCEMENTS];
  ProxycclAnnouncementReply replies[PROXYCCL_ANNOUNCEMENTS][PROXYCCL_ANNOUNCEMENT_PEERS];
} ProxycclAnnouncements;

/* By the owner, one thread at a time: changes an entry. No bytes withdraw what is there. */
void proxyccl_announce(ProxycclAnnouncements *table, uint32_t entry, const char *handle, uint32_t bytes);
/* The number of changes of the table. */
uint64_t proxyccl_announcement_changes(const ProxycclAnnouncements *table);
/* By a peer that has seen the number of changes: the first entry from `entry` on that differs from what was handled, or
 * PROXYCCL_ANNOUNCEMENTS. `handled`: for each entry `for_proxies` in the upper half, and the version. */
uint32_t proxyccl_announcement_changed(const ProxycclAnnouncements *table, uint32_t entry, const uint64_t *handled);
/* By a peer: copies an entry. Returns its version, or 0 while it is being written. */
uint32_t proxyccl_announcement_read(const ProxycclAnnouncements *table, uint32_t entry, ProxycclAnnouncement *copy);
/* By a peer: says that it has handled a version. `address`: where its kernels reach the memory, or
 * PROXYCCL_UNREACHED; 0 for memory that was withdrawn. */
void proxyccl_announcement_reply(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                 uint64_t address);
/* By the owner: asks peers to register an entry's memory with their proxies. */
void proxyccl_announce_to_proxies(ProxycclAnnouncements *table, uint32_t entry);
/* By a peer, for memory that the owner wants proxies to know: the id of a version, or PROXYCCL_NO_MEMORY. */
void proxyccl_announcement_reply_memory(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                        uint32_t id);
/* By the owner: the id that a peer replied. Returns 1 if the reply is to the entry's present version, else 0. */
int proxyccl_announcement_memory(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t *id);
/* By the owner: the address that a peer replied. Returns 1 if the reply is to the entry's present version, else 0. */
int proxyccl_announcement_reached(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint64_t *address);

#endif
