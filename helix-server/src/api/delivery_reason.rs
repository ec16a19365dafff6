//! Reasons why no records of a group's partition arrive.

use std::time::Duration;

use helix_proto::log::v1::{CommitStatus, DeliveryStatus, OffsetAndLag};

/// Heartbeats that a member may miss before it counts as silent, as a part of its session timeout.
const SILENT_PART: u32 = 2;

/// State of a group's partition, as its coordinator knows it.
#[derive(Debug, Clone)]
pub(super) struct DeliveryState<'a> {
    pub(super) is_topic_deleted: bool,
    /// Member that has the partition, or the reason why none has it.
    pub(super) owner: Result<DeliveryOwner<'a>, Unassigned>,
    /// Member that the assignment gives it to.
    pub(super) target: Option<&'a str>,
    pub(super) has_leader: bool,
    /// The partition has no records, as its leader knows.
    pub(super) is_empty: bool,
    /// Id of an earlier topic of the name, to which the group's offsets belong.
    pub(super) earlier_topic: Option<u64>,
    pub(super) offset: Option<&'a OffsetAndLag>,
}

/// Member that has a partition.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeliveryOwner<'a> {
    pub(super) id: &'a str,
    /// Time since its last heartbeat, or since this coordinator took over if that is later.
    pub(super) silence: Duration,
    /// This coordinator has heard from it.
    pub(super) is_heard: bool,
    pub(super) session_timeout: Duration,
    pub(super) has_paused: bool,
    /// The quota of its principal delays its reads.
    pub(super) is_throttled: bool,
}

/// Reason why no member has a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unassigned {
    /// The group has no members; the time since the last one left, if this coordinator knows it.
    NoMembers(Option<Duration>),
    /// The assignment is not computed yet.
    Assigning,
    /// The group does not subscribe to the topic.
    NotSubscribed,
    /// The assignment has as many as its limit, which is named.
    LeftOut { limit: usize, what: &'static str },
    /// Its next owner has not sent a heartbeat since.
    NotTaken,
}

/// Reason why no records of a partition arrive, or that they do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeliveryReason {
    pub(super) status: DeliveryStatus,
    pub(super) detail: String,
    pub(super) waiting_for: String,
}

impl DeliveryReason {
    fn new(status: DeliveryStatus, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), waiting_for: String::new() }
    }

    fn unassigned(why: Unassigned) -> Self {
        let detail = match why {
            Unassigned::NoMembers(None) => "the group has no members".to_owned(),
            Unassigned::NoMembers(Some(since)) => {
                format!("the group has had no members for {} s", since.as_secs())
            }
            Unassigned::Assigning => "the assignment is being computed".to_owned(),
            Unassigned::NotSubscribed => "no member subscribes to the topic".to_owned(),
            Unassigned::LeftOut { limit, what } => format!(
                "the group subscribes to more than the {limit} {what} of an assignment; subscribe \
                 to fewer, or use several groups"
            ),
            Unassigned::NotTaken => "the member takes it over with its next heartbeat".to_owned(),
        };
        Self::new(DeliveryStatus::Unassigned, detail)
    }
}

impl DeliveryState<'_> {
    /// Returns the first reason that applies, from the causes to the effects.
    pub(super) fn reason(&self) -> DeliveryReason {
        if self.is_topic_deleted {
            return DeliveryReason::new(DeliveryStatus::TopicDeleted, "the topic was deleted");
        }
        let owner = match self.owner {
            Ok(owner) => owner,
            Err(why) => return DeliveryReason::unassigned(why),
        };
        let id = owner.id;
        if let Some(target) = self.target.filter(|target| *target != id) {
            let detail = format!("{target} waits until {id} has released the partition");
            let reason = DeliveryReason::new(DeliveryStatus::WaitingForRelease, detail);
            return DeliveryReason { waiting_for: id.to_owned(), ..reason };
        }
        let timeout = owner.session_timeout;
        let silence = owner.silence;
        if silence > timeout / SILENT_PART {
            let detail = match owner.is_heard {
                true => format!("{id} is silent for {silence:?} of its {timeout:?}"),
                false => format!(
                    "the coordinator took over {silence:?} ago and has not heard from {id} since; \
                     its session timeout is {timeout:?}"
                ),
            };
            return DeliveryReason::new(DeliveryStatus::OwnerSilent, detail);
        }
        if owner.has_paused {
            let detail = format!("{id} has paused the partition");
            return DeliveryReason::new(DeliveryStatus::Paused, detail);
        }
        if !self.has_leader {
            let detail = "the partition's shard has no leader";
            return DeliveryReason::new(DeliveryStatus::NoLeader, detail);
        }
        self.of_records(owner)
    }

    /// Returns the reason of a partition that nothing but its records and a quota can stop.
    fn of_records(&self, owner: DeliveryOwner<'_>) -> DeliveryReason {
        let id = owner.id;
        let throttled = || {
            let detail = format!("reads of {id} are over its principal's quota of bytes out");
            DeliveryReason::new(DeliveryStatus::Throttled, detail)
        };
        if let Some(earlier) = self.earlier_topic {
            let detail = format!(
                "the topic was created again, and the group's offsets belong to the earlier one, \
                 id {earlier}; seek the group to an offset of the new topic"
            );
            return DeliveryReason::new(DeliveryStatus::TopicRecreated, detail);
        }
        let Some(offset) = self.offset else {
            return match owner.is_throttled {
                _ if self.is_empty => {
                    let detail = "the partition has no records";
                    DeliveryReason::new(DeliveryStatus::NoNewRecords, detail)
                }
                true => throttled(),
                false => {
                    let detail = format!("{id} has not committed an offset yet");
                    DeliveryReason::new(DeliveryStatus::Flowing, detail)
                }
            };
        };
        match offset.status() {
            CommitStatus::BelowLogStart | CommitStatus::AboveHighWatermark => {
                let start = offset.log_start_offset.unwrap_or_default();
                let end = offset.high_watermark.unwrap_or_default();
                let detail = format!("the committed offset is out of {start}..{end}");
                DeliveryReason::new(DeliveryStatus::OffsetOutOfRange, detail)
            }
            _ => match offset.lag {
                None => {
                    let detail = "the partition's leader does not answer, so its end is unknown";
                    DeliveryReason::new(DeliveryStatus::NoLeader, detail)
                }
                Some(0) => {
                    DeliveryReason::new(DeliveryStatus::NoNewRecords, "everything is committed")
                }
                Some(_) if owner.is_throttled => throttled(),
                Some(lag) => {
                    let detail = format!("{id} has {lag} records to commit");
                    DeliveryReason::new(DeliveryStatus::Flowing, detail)
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: DeliveryOwner<'static> = DeliveryOwner {
        id: "a",
        silence: Duration::from_secs(2),
        is_heard: true,
        session_timeout: Duration::from_secs(10),
        has_paused: false,
        is_throttled: false,
    };

    /// A partition of the member "a", which has records and no commit.
    fn owned() -> DeliveryState<'static> {
        DeliveryState {
            is_topic_deleted: false,
            owner: Ok(OWNER),
            target: Some("a"),
            has_leader: true,
            is_empty: false,
            earlier_topic: None,
            offset: None,
        }
    }

    fn commit(status: CommitStatus, lag: u64) -> OffsetAndLag {
        OffsetAndLag {
            status: status.into(),
            lag: (status != CommitStatus::Unknown).then_some(lag),
            log_start_offset: Some(3),
            high_watermark: Some(9),
            ..OffsetAndLag::default()
        }
    }

    fn expect(state: &DeliveryState<'_>, status: DeliveryStatus, words: &str) {
        let reason = state.reason();
        assert_eq!(reason.status, status, "{reason:?}");
        assert!(reason.detail.contains(words), "{reason:?}");
        let is_waiting = status == DeliveryStatus::WaitingForRelease;
        assert_eq!(reason.waiting_for, if is_waiting { "a" } else { "" });
    }

    #[test]
    fn every_status_has_its_cause() {
        use DeliveryStatus as S;
        let of = |owner| DeliveryState { owner: Ok(owner), ..owned() };
        let silent = DeliveryOwner { silence: Duration::from_millis(5_001), ..OWNER };
        let half = DeliveryOwner { silence: Duration::from_secs(5), ..OWNER };
        let unheard = DeliveryOwner { is_heard: false, ..OWNER };
        let never_heard = DeliveryOwner { is_heard: false, ..silent };
        let recreated = || DeliveryState { earlier_topic: Some(5), ..owned() };
        let paused = DeliveryOwner { has_paused: true, ..OWNER };
        let throttled = DeliveryOwner { is_throttled: true, ..OWNER };
        for (state, status, words) in [
            (owned(), S::Flowing, "has not committed"),
            (of(half), S::Flowing, "has not committed"),
            (of(unheard), S::Flowing, "has not committed"),
            (of(silent), S::OwnerSilent, "a is silent for 5.001s of its 10s"),
            (of(never_heard), S::OwnerSilent, "took over 5.001s ago and has not heard from a"),
            (recreated(), S::TopicRecreated, "earlier one, id 5; seek the group"),
            (DeliveryState { is_empty: true, ..recreated() }, S::TopicRecreated, ""),
            (of(paused), S::Paused, "a has paused"),
            (of(throttled), S::Throttled, "reads of a are over"),
            (DeliveryState { has_leader: false, ..owned() }, S::NoLeader, "no leader"),
            (DeliveryState { is_topic_deleted: true, ..owned() }, S::TopicDeleted, "deleted"),
            (DeliveryState { is_empty: true, ..owned() }, S::NoNewRecords, "no records"),
            (DeliveryState { is_empty: true, ..of(throttled) }, S::NoNewRecords, "no records"),
            (
                DeliveryState { target: Some("b"), ..owned() },
                S::WaitingForRelease,
                "b waits until a has released",
            ),
            // The assignment does not exist yet, or has no place for it.
            (DeliveryState { target: None, ..owned() }, S::Flowing, "has not committed"),
        ] {
            expect(&state, status, words);
        }
        for (status, lag, expected, words) in [
            (CommitStatus::Valid, 0, S::NoNewRecords, "everything is committed"),
            (CommitStatus::Valid, 4, S::Flowing, "a has 4 records to commit"),
            (CommitStatus::BelowLogStart, 4, S::OffsetOutOfRange, "out of 3..9"),
            (CommitStatus::AboveHighWatermark, 0, S::OffsetOutOfRange, "out of 3..9"),
            (CommitStatus::Unknown, 0, S::NoLeader, "its end is unknown"),
        ] {
            let offset = commit(status, lag);
            expect(&DeliveryState { offset: Some(&offset), ..owned() }, expected, words);
        }
        let offset = commit(CommitStatus::Valid, 4);
        expect(&DeliveryState { offset: Some(&offset), ..of(throttled) }, S::Throttled, "quota");
    }

    #[test]
    fn unassigned_partitions_say_why_and_since_when() {
        for (why, words) in [
            (Unassigned::NoMembers(None), "the group has no members"),
            (Unassigned::NoMembers(Some(Duration::from_millis(61_900))), "no members for 61 s"),
            (Unassigned::Assigning, "is being computed"),
            (Unassigned::NotSubscribed, "no member subscribes"),
            (Unassigned::LeftOut { limit: 7, what: "topics" }, "more than the 7 topics of an"),
            (Unassigned::NotTaken, "with its next heartbeat"),
        ] {
            let state = DeliveryState { owner: Err(why), ..owned() };
            expect(&state, DeliveryStatus::Unassigned, words);
        }
    }

    /// The first cause is the one to remove.
    #[test]
    fn causes_come_before_their_effects() {
        use DeliveryStatus as S;
        let offset = commit(CommitStatus::BelowLogStart, 4);
        let silence = Duration::from_secs(9);
        let owner = DeliveryOwner { silence, has_paused: true, is_throttled: true, ..OWNER };
        let mut state = DeliveryState {
            is_topic_deleted: true,
            owner: Ok(owner),
            target: Some("b"),
            has_leader: false,
            is_empty: true,
            earlier_topic: None,
            offset: Some(&offset),
        };
        expect(&state, S::TopicDeleted, "");
        state.is_topic_deleted = false;
        expect(&state, S::WaitingForRelease, "");
        state.target = Some("a");
        expect(&state, S::OwnerSilent, "");
        let silence = Duration::ZERO;
        state.owner = Ok(DeliveryOwner { silence, ..owner });
        expect(&state, S::Paused, "");
        state.owner = Ok(DeliveryOwner { silence, has_paused: false, ..owner });
        expect(&state, S::NoLeader, "");
        state.has_leader = true;
        expect(&state, S::OffsetOutOfRange, "");
    }
}
