//! Random commands of groups for tests.

use rand::RngExt;
use rand::rngs::StdRng;

use super::*;

/// Returns a command with random contents of every kind.
pub(crate) fn random_command(rng: &mut StdRng) -> GroupCommand {
    let text = |rng: &mut StdRng| {
        let chars = ['a', 'Z', '0', '.', '*', 'é'];
        let length = rng.random_range(1..9);
        (0..length).map(|_| chars[rng.random_range(0..chars.len())]).collect::<String>()
    };
    let number = |rng: &mut StdRng| rng.random::<u64>() >> rng.random_range(0..64);
    let topics = |rng: &mut StdRng| {
        let update = |rng: &mut StdRng| OffsetUpdate {
            number: rng.random_range(0..9),
            offset: rng.random_bool(0.8).then(|| number(rng)),
            metadata: if rng.random() { text(rng) } else { String::new() },
        };
        let topic = |rng: &mut StdRng| TopicOffsets {
            topic_id: number(rng),
            name: text(rng),
            offsets: (0..rng.random_range(0..4)).map(|_| update(rng)).collect(),
        };
        (0..rng.random_range(0..3)).map(|_| topic(rng)).collect()
    };
    let change = match rng.random_range(0..9) {
        0 => GroupChange::PutMember {
            member: MemberSpec {
                member_id: text(rng),
                static_name: if rng.random() { text(rng) } else { String::new() },
                client_name: if rng.random() { text(rng) } else { String::new() },
                session_timeout_ms: rng.random_range(0..100_000),
                topics: (0..rng.random_range(0..4)).map(|_| text(rng)).collect(),
            },
            take_over: rng.random(),
            joined_epoch: if rng.random() { number(rng) } else { 0 },
        },
        1 => GroupChange::RemoveMembers {
            members: (0..rng.random_range(0..4)).map(|_| text(rng)).collect(),
        },
        2 => GroupChange::Assign(Assignment {
            group_epoch: number(rng),
            topics: (0..rng.random_range(0..4)).map(|_| (number(rng), 3)).collect(),
            owners: (0..rng.random_range(0..9)).map(|_| rng.random_range(0..300)).collect(),
        }),
        3 => GroupChange::Release {
            member_id: text(rng),
            epoch: number(rng),
            partitions: (0..rng.random_range(0..4))
                .map(|_| PartitionKey { topic_id: number(rng), number: rng.random_range(0..9) })
                .collect(),
        },
        4 => GroupChange::Commit {
            member: rng.random_bool(0.7).then(|| CommittingMember {
                member_id: text(rng),
                epoch: number(rng),
                sequence: number(rng),
            }),
            offsets_epoch: rng.random_bool(0.5).then(|| number(rng)),
            topics: topics(rng),
            at_us: number(rng),
        },
        5 => GroupChange::Seek {
            origin: SeekOrigin {
                by: text(rng),
                is_undo: rng.random(),
                offsets_epoch: rng.random_bool(0.5).then(|| number(rng)),
            },
            topics: topics(rng),
            at_us: number(rng),
        },
        6 => GroupChange::ForgetTopics {
            topic_ids: (0..rng.random_range(0..4)).map(|_| number(rng)).collect(),
        },
        7 => GroupChange::ForgetTopic {
            topic: text(rng),
            topic_id: number(rng),
            offsets_epoch: rng.random_bool(0.5).then(|| number(rng)),
        },
        _ => GroupChange::Delete { offsets_epoch: rng.random_bool(0.5).then(|| number(rng)) },
    };
    GroupCommand { group: text(rng), change, is_ordered: rng.random() }
}
