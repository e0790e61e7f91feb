/* Announcements: a rank offers memory to the other ranks of the host, which map the memory and reply with the memory's
 * address.
 *
 * Each rank owns one table, in memory that all ranks of the host map. The owner announces and withdraws memory in the
 * table's entries. When an entry changes, each peer maps or unmaps the memory, and replies with the memory's address
 * for the peer's kernels. If the owner asks proxies to register the memory, the peer also replies with the memory's id
 * in the peer's proxy. A reply contains the version of the entry to which it replies, so a late reply is not mistaken
 * for a reply about newer memory. */
#pragma once

#include <stdint.h>

enum {
  PROXYCCL_ANNOUNCEMENTS = 512,
  PROXYCCL_ANNOUNCED_HANDLE_BYTES = 244, /* maximum number of bytes of a handle */
  PROXYCCL_ANNOUNCEMENT_PEERS = 72       /* maximum number of ranks of a host */
};

/* The address in a reply if the peer's kernels can't access the memory. */
#define PROXYCCL_UNREACHED 1ull
/* The memory id in a reply if the peer's proxy can't register the memory. */
#define PROXYCCL_NO_MEMORY 0xfffffffeu

typedef struct ProxycclAnnouncement {
  uint32_t version;      /* incremented twice for each change; odd while the handle is being written; 0 if never used */
  uint32_t handle_bytes; /* 0 if the memory was withdrawn */
  uint32_t for_proxies;  /* version of the entry whose memory proxies must register */
  char handle[PROXYCCL_ANNOUNCED_HANDLE_BYTES];
} ProxycclAnnouncement;

typedef struct ProxycclAnnouncementReply {
  uint64_t version; /* version of the announcement that the reply answers */
  uint64_t address;
  uint64_t memory; /* upper half: the version; lower half: the memory's id plus one; 0 without a reply */
} ProxycclAnnouncementReply;

typedef struct ProxycclAnnouncements {
  uint64_t changes; /* incremented after each change */
  ProxycclAnnouncement entries[PROXYCCL_ANNOUNCEMENTS];
  ProxycclAnnouncementReply replies[PROXYCCL_ANNOUNCEMENTS][PROXYCCL_ANNOUNCEMENT_PEERS];
} ProxycclAnnouncements;

/* Announces the memory of `handle` in an entry, or withdraws the entry's memory if `bytes` is 0. Only one thread of the
 * owner may call this function at a time. */
void proxyccl_announce(ProxycclAnnouncements *table, uint32_t entry, const char *handle, uint32_t bytes);
/* Returns how often the table's entries have changed. */
uint64_t proxyccl_announcement_changes(const ProxycclAnnouncements *table);
/* Returns the first entry, from `entry` on, that has changed since the calling peer handled it, or
 * PROXYCCL_ANNOUNCEMENTS if there is none. For each entry, `handled` has the values that the peer has handled:
 * `for_proxies` in the upper half and the version in the lower half. */
uint32_t proxyccl_announcement_changed(const ProxycclAnnouncements *table, uint32_t entry, const uint64_t *handled);
/* A peer calls this to copy an entry. Returns the entry's version, or 0 while the entry is being written. */
uint32_t proxyccl_announcement_read(const ProxycclAnnouncements *table, uint32_t entry, ProxycclAnnouncement *copy);
/* A peer calls this to reply that it has handled a version. `address` is the memory's address for the peer's kernels,
 * or PROXYCCL_UNREACHED, or 0 if the memory was withdrawn. */
void proxyccl_announcement_reply(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                 uint64_t address);
/* The owner calls this to ask peers to register an entry's memory with their proxies. */
void proxyccl_announce_to_proxies(ProxycclAnnouncements *table, uint32_t entry);
/* A peer that was asked to register an entry's memory with its proxy calls this to reply with the memory's id, or with
 * PROXYCCL_NO_MEMORY. */
void proxyccl_announcement_reply_memory(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                        uint32_t id);
/* The owner calls this to read the memory id of a peer's reply into *id. Returns 1 if the reply is to the entry's
 * present version, otherwise 0. */
int proxyccl_announcement_memory(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t *id);
/* The owner calls this to read the address of a peer's reply into *address. Returns 1 if the reply is to the entry's
 * present version, otherwise 0. */
int proxyccl_announcement_reached(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint64_t *address);
