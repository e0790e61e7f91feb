/* How ranks of a host meet without a bootstrap: through memory that all of them map.
 *
 * Each rank owns one rendezvous. Ranks that form a new group leave invitations in it, under a key that the members
 * know. Ranks of a group exchange messages through their mailboxes. Proposals for the whole group are decided in the
 * first rank's rendezvous, which outlives that rank as long as others map it.
 */
#ifndef PROXYCCL_RENDEZVOUS_H
#define PROXYCCL_RENDEZVOUS_H

#include <stdint.h>

enum {
  PROXYCCL_MAILBOX_BYTES = 8192,   /* bytes of a part of a message */
  PROXYCCL_INVITATIONS = 64,       /* groups that threads of one rank may make at a time */
  PROXYCCL_INVITATION_BYTES = 244, /* the longest handle */
  PROXYCCL_DECISIONS = 64
};

/* A part of a message. */
typedef struct ProxycclLetter {
  uint32_t message_bytes; /* bytes of the whole message */
  uint32_t part_bytes;    /* bytes of this part */
  char data[PROXYCCL_MAILBOX_BYTES];
} ProxycclLetter;

/* Letters alternate between two places. A rank that has posted letter k+1 has read letter k of all ranks. So letter k+2
 * may replace letter k once all letters k+1 are posted. */
typedef struct ProxycclMailbox {
  uint64_t posted; /* number of letters */
  ProxycclLetter letters[2];
} ProxycclMailbox;

typedef struct ProxycclInvitation {
  uint64_t key; /* 0: no invitation */
  uint32_t handle_bytes;
  char handle[PROXYCCL_INVITATION_BYTES];
} ProxycclInvitation;

typedef struct ProxycclRendezvous {
  ProxycclMailbox mailbox;
  ProxycclInvitation invitations[PROXYCCL_INVITATIONS];
  uint64_t decisions[PROXYCCL_DECISIONS]; /* 0: not decided yet */
} ProxycclRendezvous;

/* By the owner: posts the next letter, which is a part of a message of `message_bytes`. */
void proxyccl_mailbox_post(ProxycclRendezvous *own, const char *data, uint32_t bytes, uint32_t message_bytes);
/* By a peer: copies the letter with this number, counted from 0. Returns 1, or 0 if the letter is not posted yet. */
int proxyccl_mailbox_read(const ProxycclRendezvous *theirs, uint64_t number, ProxycclLetter *copy);

/* By the owner, one thread at a time: leaves a handle under a key, in a place without an invitation. */
void proxyccl_invite(ProxycclRendezvous *own, uint32_t place, uint64_t key, const char *handle, uint32_t bytes);
/* By the owner: withdraws the invitation in a place. */
void proxyccl_invitation_withdraw(ProxycclRendezvous *own, uint32_t place);
/* By a peer: copies the handle under a key. Returns 1, or 0 if there is no such key. */
int proxyccl_invitation_find(const ProxycclRendezvous *theirs, uint64_t key, ProxycclInvitation *copy);

/* By any rank, in the first rank's rendezvous: decides a question by a nonzero value, unless it is already decided.
 * Returns the decision: the value of the rank that came first. */
uint64_t proxyccl_decide(ProxycclRendezvous *first, uint32_t question, uint64_t value);
/* Returns the decision; 0 if the question is not decided. */
uint64_t proxyccl_decision(const ProxycclRendezvous *first, uint32_t question);

#endif
