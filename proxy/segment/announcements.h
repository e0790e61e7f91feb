/* Announcements: memory of a rank that the other ranks of its host may map, and the address at which each of them did.
 *
 * Each rank has one table, in memory that all ranks of the host map. Its owner announces memory and withdraws it. Each
 * peer maps or unmaps what changed, and replies with the address at which its kernels reach the memory. If the owner
 * asks for it, the peer also replies with the id by which its proxy knows the memory. A reply names the version that it
 * answers, so a late reply is not taken for a reply about newer memory.
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
  uint32_t version;      /* incremented twice for each change; odd while the handle is being written; 0: never used */
  uint32_t handle_bytes; /* 0: the memory was withdrawn */
  uint32_t for_proxies;  /* the version that the owner wants proxies to register */
  char handle[PROXYCCL_ANNOUNCED_HANDLE_BYTES];
} ProxycclAnnouncement;

typedef struct ProxycclAnnouncementReply {
  uint64_t version; /* version of the announcement that the reply answers */
  uint64_t address;
  uint64_t memory; /* the version in the upper half, the id plus one in the lower half; 0: no reply */
} ProxycclAnnouncementReply;

typedef struct ProxycclAnnouncements {
  uint64_t changes; /* incremented after each change */
  ProxycclAnnouncement entries[PROXYCCL_ANNOUNCEMENTS];
  ProxycclAnnouncementReply replies[PROXYCCL_ANNOUNCEMENTS][PROXYCCL_ANNOUNCEMENT_PEERS];
} ProxycclAnnouncements;

/* By the owner, one thread at a time: changes an entry. `bytes` 0 withdraws the entry's memory. */
void proxyccl_announce(ProxycclAnnouncements *table, uint32_t entry, const char *handle, uint32_t bytes);
/* Returns the number of changes to the table. */
uint64_t proxyccl_announcement_changes(const ProxycclAnnouncements *table);
/* By a peer, when the number of changes has grown: returns the first entry, from `entry` on, that the peer has not
 * handled, or PROXYCCL_ANNOUNCEMENTS. `handled`: for each entry, the handled `for_proxies` in the upper half and the
 * handled version in the lower half. */
uint32_t proxyccl_announcement_changed(const ProxycclAnnouncements *table, uint32_t entry, const uint64_t *handled);
/* By a peer: copies an entry. Returns its version, or 0 while it is being written. */
uint32_t proxyccl_announcement_read(const ProxycclAnnouncements *table, uint32_t entry, ProxycclAnnouncement *copy);
/* By a peer: reports that the peer has handled a version. `address`: where its kernels reach the memory, or
 * PROXYCCL_UNREACHED; 0 for memory that was withdrawn. */
void proxyccl_announcement_reply(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                 uint64_t address);
/* By the owner: asks peers to register an entry's memory with their proxies. */
void proxyccl_announce_to_proxies(ProxycclAnnouncements *table, uint32_t entry);
/* By a peer whose proxy was asked to register the memory: replies with the id for a version, or PROXYCCL_NO_MEMORY. */
void proxyccl_announcement_reply_memory(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                        uint32_t id);
/* By the owner: gets the id that a peer replied with. Returns 1 if the reply is to the entry's present version, else 0.
 */
int proxyccl_announcement_memory(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t *id);
/* By the owner: gets the address that a peer replied with. Returns 1 if the reply is to the entry's present version,
 * else 0. */
int proxyccl_announcement_reached(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint64_t *address);

#endif
