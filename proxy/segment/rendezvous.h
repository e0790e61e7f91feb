/* Ranks of a host form groups without a bootstrap, through memory that all these ranks map.
 *
 * Each rank owns one rendezvous. A rank that forms a new group leaves invitations in its own rendezvous, under a key
 * that the group's members know. Ranks of a group exchange messages through their mailboxes. Questions that concern the
 * whole group are decided in the first rank's rendezvous, whose memory exists as long as any rank maps this memory. */
#pragma once

#include <stdint.h>

enum {
  PROXYCCL_MAILBOX_BYTES = 8192,   /* maximum number of bytes of a part of a message */
  PROXYCCL_INVITATIONS = 96,       /* maximum number of one rank's invitations, for new groups, notes and answers */
  PROXYCCL_INVITATION_BYTES = 244, /* maximum number of bytes of a handle */
  PROXYCCL_DECISIONS = 80
};

/* A part of a message. */
typedef struct ProxycclLetter {
  uint32_t message_bytes; /* bytes of the whole message */
  uint32_t part_bytes;    /* bytes of this part */
  char data[PROXYCCL_MAILBOX_BYTES];
} ProxycclLetter;

/* A mailbox stores letters alternately in two slots. A rank posts letter k+1 only after it has read letter k of every
 * rank. So a rank may overwrite its letter k with letter k+2 once every rank has posted letter k+1. */
typedef struct ProxycclMailbox {
  uint64_t posted; /* number of letters posted so far */
  ProxycclLetter letters[2];
} ProxycclMailbox;

typedef struct ProxycclInvitation {
  uint64_t key; /* 0 if there is no invitation */
  uint32_t handle_bytes;
  char handle[PROXYCCL_INVITATION_BYTES];
} ProxycclInvitation;

typedef struct ProxycclRendezvous {
  ProxycclMailbox mailbox;
  ProxycclInvitation invitations[PROXYCCL_INVITATIONS];
  uint64_t decisions[PROXYCCL_DECISIONS]; /* for each question: the decision, or 0 if the question is not decided yet */
} ProxycclRendezvous;

/* The owner calls this to post the next letter: a part of a message of `message_bytes` bytes. */
void proxyccl_mailbox_post(ProxycclRendezvous *own, const char *data, uint32_t bytes, uint32_t message_bytes);
/* A peer calls this to copy letter `number`, counted from 0. Returns 1, or 0 if the letter is not posted yet. */
int proxyccl_mailbox_read(const ProxycclRendezvous *theirs, uint64_t number, ProxycclLetter *copy);

/* Stores an invitation, which has a key and a handle, in the empty slot `place`. Only one thread of the owner may call
 * this function at a time. */
void proxyccl_invite(ProxycclRendezvous *own, uint32_t place, uint64_t key, const char *handle, uint32_t bytes);
/* The owner calls this to withdraw the invitation in slot `place`. */
void proxyccl_invitation_withdraw(ProxycclRendezvous *own, uint32_t place);
/* A peer calls this to copy the invitation with the key `key`. Returns 1, or 0 if no such invitation is complete. */
int proxyccl_invitation_find(const ProxycclRendezvous *theirs, uint64_t key, ProxycclInvitation *copy);

/* Decides a question with a nonzero value, unless the question is already decided. Returns the decision. Any rank may
 * call this function, with the rendezvous of the group's first rank. */
uint64_t proxyccl_decide(ProxycclRendezvous *first, uint32_t question, uint64_t value);
/* Returns a question's decision; 0 if the question is not decided yet. */
uint64_t proxyccl_decision(const ProxycclRendezvous *first, uint32_t question);
