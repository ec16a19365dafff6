//! Heads for tests. Random ones are made from a seed that every test prints.
//! `HELIX_SEED` repeats a run.

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::{
    AddMember, BatchChecksum, BatchHead, CleanupRound, ClusterCommand, Condition, CreateTopic,
    FencingToken, Head, InitMembers, Joined, KeptOffsets, MemberCommand, PartitionId, PartitionRun,
    PartitionSettings, ProducerOwner, ProducerStamp, RemoveMember, ReplaceMember, SetDraining,
    SettingsMask, ShardCommand, SplitRule,
};

/// Returns the generator of the test `name`, seeded by `HELIX_SEED` or a new seed.
pub(crate) fn seeded(name: &str) -> StdRng {
    let given = std::env::var("HELIX_SEED").ok();
    let given = given.map(|seed| seed.parse().expect("HELIX_SEED is a number"));
    let seed = given.unwrap_or_else(|| crate::random::from_system().next_u64());
    println!("{name}: HELIX_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// Returns numbers of every magnitude.
fn any_u64(rng: &mut StdRng) -> u64 {
    rng.random::<u64>() >> rng.random_range(0..64)
}

fn any_u32(rng: &mut StdRng) -> u32 {
    rng.random::<u32>() >> rng.random_range(0..32)
}

fn any_text(rng: &mut StdRng) -> String {
    let chars = ['a', 'Z', '0', '.', '_', '-', 'é'];
    (0..rng.random_range(0..12)).map(|_| chars[rng.random_range(0..chars.len())]).collect()
}

pub(crate) fn any_settings(rng: &mut StdRng) -> PartitionSettings {
    PartitionSettings {
        retention_us: rng.random_bool(0.5).then(|| any_u64(rng)),
        retention_bytes: rng.random_bool(0.5).then(|| any_u64(rng)),
        max_batch_bytes: any_u32(rng),
        max_record_bytes: any_u32(rng),
        default_durability: rng.random_range(0..5),
        min_durability: rng.random_range(-1..5),
        version: any_u64(rng),
        allowed_compression: rng.random_range(0..6),
        batch_format: rng.random_range(0..5),
        takes_any_records: rng.random_bool(0.5),
        cleanup: rng.random_range(0..4),
        tombstone_retention_us: rng.random_bool(0.5).then(|| any_u64(rng)),
    }
}

/// Returns a batch without anything optional.
pub(crate) fn batch_head(partition: u64, record_count: u32) -> BatchHead {
    BatchHead {
        partition: PartitionId(partition),
        record_count,
        version: 1,
        compression: 1,
        payload_bytes: 100,
        uncompressed_bytes: 0,
        proposed_us: 0,
        producer: None,
        condition: Condition::default(),
        kept: None,
    }
}

/// Returns a random valid head.
pub(crate) fn random_head(rng: &mut StdRng) -> Head {
    match rng.random_range(0..3) {
        0 => Head::Batch(random_batch(rng)),
        1 => Head::Shard(random_shard_command(rng)),
        _ => Head::Cluster(random_cluster_command(rng)),
    }
}

fn random_batch(rng: &mut StdRng) -> BatchHead {
    let kept = rng.random_bool(0.2).then(|| {
        let count = rng.random_range(2..300);
        let last = rng.random_range(0..count);
        let deltas: Vec<u32> = (0..last).filter(|_| rng.random_bool(0.5)).chain([last]).collect();
        let missing = deltas.len() < count as usize;
        missing.then(|| KeptOffsets::new(count, deltas)).flatten()
    });
    let kept = kept.flatten().map(Box::new);
    let records = kept.as_ref().map(|kept| kept.deltas().len() as u32);
    BatchHead {
        partition: PartitionId(any_u64(rng)),
        record_count: records.unwrap_or_else(|| any_u32(rng)),
        version: any_u32(rng),
        compression: rng.random(),
        payload_bytes: any_u32(rng),
        uncompressed_bytes: if rng.random_bool(0.5) { any_u32(rng) } else { 0 },
        proposed_us: any_u64(rng),
        producer: rng.random_bool(0.5).then(|| ProducerStamp {
            producer_id: any_u64(rng),
            epoch: any_u32(rng),
            first_sequence: any_u64(rng),
            owner: any_owner(rng),
            checksum: rng.random_bool(0.5).then(|| BatchChecksum::of_crc(any_u32(rng))),
        }),
        condition: any_condition(rng),
        kept,
    }
}

fn any_owner(rng: &mut StdRng) -> ProducerOwner {
    match rng.random_range(0..3) {
        0 => ProducerOwner::ANONYMOUS,
        1 => ProducerOwner::SESSION,
        _ => ProducerOwner::of(&any_text(rng)),
    }
}

fn any_condition(rng: &mut StdRng) -> Condition {
    Condition {
        expected_offset: rng.random_bool(0.3).then(|| any_u64(rng)),
        fencing_token: rng.random_bool(0.3).then(|| any_token(rng)),
    }
}

/// Returns tokens of every length up to the limit.
fn any_token(rng: &mut StdRng) -> FencingToken {
    let length = if rng.random_bool(0.2) { 64 } else { rng.random_range(0..64) };
    FencingToken::new(&"t".repeat(length)).expect("the token is within the limit")
}

fn random_shard_command(rng: &mut StdRng) -> ShardCommand {
    let (cluster_version, topic_id) = (any_u64(rng), any_u64(rng));
    match rng.random_range(0..12) {
        0 => {
            let run = |rng: &mut StdRng| PartitionRun {
                first_id: rng.random_range(1..1 << 60),
                first_number: rng.random_range(0..100_000),
                stride: rng.random_range(1..100),
                count: rng.random_range(1..100_000),
            };
            let runs = (0..rng.random_range(0..5)).map(|_| run(rng)).collect();
            let settings = any_settings(rng);
            ShardCommand::CreatePartitions { cluster_version, topic_id, runs, settings }
        }
        1 => ShardCommand::UpdateSettings { topic_id, settings: any_settings(rng) },
        2 => ShardCommand::DropTopic { cluster_version, topic_id },
        3 => ShardCommand::Release { index: any_u64(rng) },
        4 => ShardCommand::SetFencingToken {
            partition: PartitionId(any_u64(rng)),
            expected: rng.random_bool(0.5).then(|| any_token(rng)),
            token: any_token(rng),
        },
        6 => {
            let round = |rng: &mut StdRng| {
                let (upto, tombstones_below) = (any_u64(rng), any_u64(rng));
                (PartitionId(any_u64(rng)), CleanupRound { upto, tombstones_below })
            };
            ShardCommand::CleanUp {
                rounds: (0..rng.random_range(0..9)).map(|_| round(rng)).collect(),
            }
        }
        7 => {
            let row = |rng: &mut StdRng| (PartitionId(any_u64(rng)), any_u64(rng));
            let partitions = (0..rng.random_range(0..9)).map(|_| row(rng)).collect();
            ShardCommand::Cleaned { partitions, time_us: any_u64(rng) }
        }
        5 => ShardCommand::Group(Box::new(super::group::testing::random_command(rng))),
        8 => {
            let parts = any_u64(rng).max(2);
            let rule = SplitRule { parts, turn: any_u64(rng), ids_below: any_u64(rng) };
            ShardCommand::Split { id: any_u64(rng), target: any_u64(rng), rule }
        }
        9 => ShardCommand::CancelSplit { id: any_u64(rng) },
        10 => ShardCommand::FinishSplit { id: any_u64(rng) },
        _ => {
            let start = |rng: &mut StdRng| (PartitionId(any_u64(rng)), any_u64(rng));
            let starts = (0..rng.random_range(0..9)).map(|_| start(rng)).collect();
            ShardCommand::Trim { starts }
        }
    }
}

fn random_cluster_command(rng: &mut StdRng) -> ClusterCommand {
    let name = any_text(rng);
    match rng.random_range(0..10) {
        0 => {
            let (node_id, version) = (any_u64(rng), any_text(rng));
            let peer_addr = any_text(rng);
            ClusterCommand::RegisterNode { node_id, endpoint: name, version, peer_addr }
        }
        1 => ClusterCommand::CreateTopic(CreateTopic {
            name,
            partition_count: any_u32(rng),
            replication_factor: any_u32(rng),
            settings: any_settings(rng),
            shards: (0..rng.random_range(0..5)).map(|_| any_u64(rng)).collect(),
            requested_at_us: any_u64(rng),
        }),
        2 => {
            let (settings, fields) = (any_settings(rng), SettingsMask(any_u32(rng)));
            ClusterCommand::UpdateTopic { name, topic_id: any_u64(rng), settings, fields }
        }
        3 => {
            let (topic_id, partition_count) = (any_u64(rng), any_u32(rng));
            ClusterCommand::AddPartitions { name, topic_id, partition_count }
        }
        4 => ClusterCommand::DeleteTopic { name, topic_id: any_u64(rng) },
        5 => ClusterCommand::RegisterShards {
            shards: (0..rng.random_range(0..5)).map(|_| any_u64(rng)).collect(),
        },
        6 => ClusterCommand::LeaseProducerIds { count: any_u32(rng), owner: any_owner(rng) },
        7 => ClusterCommand::Members(random_member_command(rng)),
        8 => ClusterCommand::RaiseProtocol { version: any_u32(rng) },
        9 => ClusterCommand::AssignGroupSlots,
        _ => ClusterCommand::InitProducer { name, owner: any_owner(rng) },
    }
}

fn random_member_command(rng: &mut StdRng) -> MemberCommand {
    let (node_id, peer_addr) = (any_u64(rng), any_text(rng));
    match rng.random_range(0..7) {
        0 => {
            let replicas = (0..rng.random_range(0..5)).map(|_| any_u64(rng)).collect();
            MemberCommand::InitMembers(InitMembers { replicas })
        }
        1 => MemberCommand::Add(AddMember { node_id, peer_addr }),
        2 => MemberCommand::Remove(RemoveMember { node_id }),
        3 => {
            let lost_node_id = any_u64(rng);
            let emptied = rng.random();
            let replace = ReplaceMember { lost_node_id, node_id, peer_addr, emptied };
            MemberCommand::Replace(replace)
        }
        4 => MemberCommand::SetDraining(SetDraining { node_id, draining: rng.random() }),
        5 => MemberCommand::Joined(Joined { node_id, generation: any_u32(rng) }),
        _ => MemberCommand::Finish(node_id),
    }
}
