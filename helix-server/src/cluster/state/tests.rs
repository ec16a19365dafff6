//! Invariants of the cluster's state, case by case and over random logs.

use rand::RngExt;
use rand::rngs::StdRng;

use super::*;
use crate::log::testing::{batch_head, seeded};
use crate::log::{
    AccessOperation, AccessRule, BatchChecksum, CreateToken, PartitionId, PrincipalRules,
    ProducerStamp, QuotaLimits, ResourceKind, ShardCommand, TokenRecord,
};

fn settings() -> PartitionSettings {
    PartitionSettings {
        max_batch_bytes: 1 << 20,
        max_record_bytes: 1 << 20,
        default_durability: 1,
        min_durability: 4,
        allowed_compression: 0,
        ..PartitionSettings::default()
    }
}

fn new_topic(name: &str, partition_count: u32) -> CreateTopic {
    CreateTopic {
        name: name.to_owned(),
        partition_count,
        replication_factor: 1,
        settings: settings(),
        shards: vec![1, 2, 3],
        requested_at_us: 5,
    }
}

fn create(name: &str, partition_count: u32) -> ClusterCommand {
    ClusterCommand::CreateTopic(new_topic(name, partition_count))
}

fn add(name: &str, partition_count: u32) -> ClusterCommand {
    ClusterCommand::AddPartitions { name: name.to_owned(), topic_id: 0, partition_count }
}

fn delete(name: &str) -> ClusterCommand {
    ClusterCommand::DeleteTopic { name: name.to_owned(), topic_id: 0 }
}

fn init(name: &str) -> ClusterCommand {
    init_by(name, ProducerOwner::ANONYMOUS)
}

fn init_by(name: &str, owner: ProducerOwner) -> ClusterCommand {
    ClusterCommand::InitProducer { name: name.to_owned(), owner }
}

fn lease_to(count: u32, owner: ProducerOwner) -> ClusterCommand {
    ClusterCommand::LeaseProducerIds { count, owner }
}

fn register_shards(shards: Vec<u64>) -> ClusterCommand {
    ClusterCommand::RegisterShards { shards }
}

struct Cluster {
    state: ClusterState,
    index: u64,
}

impl Cluster {
    /// Returns a cluster with the shards 1..=3.
    fn new(limits: ClusterLimits) -> Self {
        let mut cluster = Self { state: ClusterState::new(limits), index: 0 };
        assert_eq!(cluster.apply(register_shards(vec![1, 2, 3])), ClusterReply::Done);
        cluster
    }

    fn apply(&mut self, command: ClusterCommand) -> ClusterReply {
        self.index += 1;
        match self.state.apply(self.index, &Head::Cluster(command)) {
            Verdict::Cluster(reply) => reply,
            verdict => panic!("{verdict:?}"),
        }
    }

    fn topic(&mut self, command: ClusterCommand) -> Arc<TopicInfo> {
        match self.apply(command) {
            ClusterReply::Topic(topic) => topic,
            reply => panic!("{reply:?}"),
        }
    }

    /// Applies a command that must be rejected for this field and change nothing.
    fn invalid(&mut self, command: ClusterCommand, expected: &str) {
        let before = self.state.clone();
        let reply = self.apply(command);
        let is_expected =
            matches!(&reply, ClusterReply::Invalid { field, .. } if *field == expected);
        assert!(is_expected, "{reply:?} instead of {expected}");
        assert_eq!(self.state, before);
    }
}

fn cluster() -> Cluster {
    Cluster::new(ClusterLimits::default())
}

#[test]
fn topic_is_created_once() {
    let mut cluster = cluster();
    let topic = cluster.topic(create("orders", 4));
    assert_eq!((topic.id, topic.partition_count, topic.created_at_us), (1, 4, 5));
    assert_eq!(topic.settings.version, cluster.state.version());
    let before = cluster.state.clone();
    assert_eq!(cluster.apply(create("orders", 4)), ClusterReply::AlreadyExistsEqual(topic.clone()));
    let ClusterReply::AlreadyExistsDifferent { name, difference } =
        cluster.apply(create("orders", 5))
    else {
        panic!("it differs")
    };
    assert_eq!((&*name, &*difference), ("orders", "partition_count is 4, not 5"));
    assert_eq!(cluster.state, before);
    assert_eq!(cluster.state.topic("orders"), Some(&topic));
    assert_eq!(
        cluster.state.preview(&new_topic("orders", 4)),
        ClusterReply::AlreadyExistsEqual(topic)
    );
    let ClusterReply::Topic(preview) = cluster.state.preview(&new_topic("other", 4)) else {
        panic!("it can be created")
    };
    assert_eq!(cluster.state, before);
    assert_eq!(cluster.topic(create("other", 4)), preview);
}

#[test]
fn partition_ids_are_never_reused() {
    let mut cluster = cluster();
    let a = cluster.topic(create("a", 3));
    let b = cluster.topic(create("b", 2));
    let a = cluster.topic(add(&a.name, 5));
    assert_eq!(cluster.apply(delete("b")), ClusterReply::Done);
    let c = cluster.topic(create("b", 1));
    let ids = |topic: &TopicInfo| topic.locations().map(|it| it.partition.0).collect::<Vec<_>>();
    assert_eq!([ids(&a), ids(&b), ids(&c)], [vec![1, 2, 3, 6, 7], vec![4, 5], vec![8]]);
    assert_eq!((a.id, b.id, c.id), (1, 2, 3));
    assert!(cluster.state.is_deleted(b.id));
    assert!(!cluster.state.is_deleted(c.id) && !cluster.state.is_deleted(4));
    assert_eq!(cluster.state.partition_count(), 6);
}

#[test]
fn partitions_keep_their_location_when_more_are_added() {
    let mut cluster = cluster();
    let before = cluster.topic(create("a", 4));
    let after = cluster.topic(add("a", 9));
    assert!(before.locations().eq(after.locations().take(4)));
    assert_eq!(cluster.topic(add("a", 9)), after);
    cluster.invalid(add("a", 8), "partition_count");
    cluster.invalid(add("a", 0), "partition_count");
    let missing = ClusterReply::TopicNotFound { name: "b".to_owned() };
    assert_eq!(cluster.apply(add("b", 8)), missing);
}

#[test]
fn rejects_invalid_topic_names() {
    let mut cluster = cluster();
    let long = "x".repeat(250);
    for name in ["", ".", "..", "a b", "a/b", "é", "a\0", &long] {
        cluster.invalid(create(name, 1), "name");
    }
    for name in ["a", "...", "A.b_c-9", &long[..249]] {
        assert_eq!(cluster.topic(create(name, 1)).name, name);
    }
}

#[test]
fn rejects_invalid_counts_settings_and_shards() {
    let limits = ClusterLimits { partitions_max: 150_000, ..ClusterLimits::default() };
    let mut cluster = Cluster::new(limits);
    cluster.invalid(create("a", 0), "partition_count");
    cluster.invalid(create("a", 100_001), "partition_count");
    let mut refuse = |field, change: fn(&mut CreateTopic)| {
        let mut new = new_topic("a", 1);
        change(&mut new);
        cluster.invalid(ClusterCommand::CreateTopic(new), field);
    };
    refuse("replication_factor", |new| new.replication_factor = 0);
    refuse("config.max_batch_bytes", |new| new.settings.max_batch_bytes = 0);
    refuse("config.max_record_bytes", |new| new.settings.max_record_bytes = 0);
    refuse("config.default_durability", |new| new.settings.default_durability = 0);
    refuse("config.min_durability", |new| new.settings.min_durability = 5);
    refuse("shards", |new| new.shards.clear());
    refuse("shards", |new| new.shards = vec![1, 2, 1]);
    refuse("shards", |new| new.shards = vec![0, 1]);
    refuse("shards", |new| new.shards = vec![1, 4]);
    cluster.topic(create("a", 100_000));
    cluster.invalid(create("b", 50_001), "partition_count");
    cluster.topic(create("b", 50_000));
    cluster.invalid(add("b", 50_001), "partition_count");
}

#[test]
fn command_with_another_topic_id_changes_nothing() {
    let mut cluster = cluster();
    let old = cluster.topic(create("a", 1)).id;
    let name = || "a".to_owned();
    let delete_old = || ClusterCommand::DeleteTopic { name: name(), topic_id: old };
    assert_eq!(cluster.apply(delete_old()), ClusterReply::Done);
    assert_eq!(cluster.apply(delete_old()), ClusterReply::TopicNotFound { name: name() });
    let new = cluster.topic(create("a", 1));
    let before = cluster.state.clone();
    let settings = PartitionSettings { retention_bytes: Some(7), ..new.settings };
    let fields = SettingsMask::RETENTION_BYTES;
    let commands = [
        delete_old(),
        ClusterCommand::AddPartitions { name: name(), topic_id: old, partition_count: 2 },
        ClusterCommand::UpdateTopic { name: name(), topic_id: old, settings, fields },
    ];
    for command in commands {
        let recreated = ClusterReply::TopicRecreated { name: name(), topic_id: new.id };
        assert_eq!(cluster.apply(command), recreated);
        assert_eq!(cluster.state, before);
    }
    let delete_new = ClusterCommand::DeleteTopic { name: name(), topic_id: new.id };
    assert_eq!(cluster.apply(delete_new), ClusterReply::Done);
}

#[test]
fn update_changes_only_the_named_settings_and_the_version() {
    let mut cluster = cluster();
    let created = cluster.topic(create("a", 1));
    let update = |settings, fields| ClusterCommand::UpdateTopic {
        name: "a".to_owned(),
        topic_id: 0,
        settings,
        fields,
    };
    let asked = PartitionSettings {
        retention_bytes: Some(7),
        max_batch_bytes: 0,
        ..PartitionSettings::default()
    };
    let updated = cluster.topic(update(asked, SettingsMask::RETENTION_BYTES));
    let expected = PartitionSettings {
        retention_bytes: Some(7),
        version: cluster.state.version(),
        ..created.settings
    };
    assert_eq!(updated.settings, expected);
    assert!(updated.settings.version > created.settings.version);
    let before = cluster.state.clone();
    assert_eq!(cluster.topic(update(asked, SettingsMask::RETENTION_BYTES)), updated);
    assert_eq!(cluster.state, before);
    cluster.invalid(update(asked, SettingsMask(0)), "update_mask");
    cluster.invalid(update(asked, SettingsMask(1 << 20)), "update_mask");
    cluster.invalid(update(asked, SettingsMask::MAX_BATCH_BYTES), "config.max_batch_bytes");
}

#[test]
fn topics_are_listed_by_name_in_pages() {
    let mut cluster = cluster();
    for name in ["b", "a.2", "a.1", "ab", "a.3"] {
        cluster.topic(create(name, 1));
    }
    let names = |prefix, first| {
        let topics = cluster.state.topics_from(prefix, first);
        topics.map(|topic| topic.name.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(names("", ""), ["a.1", "a.2", "a.3", "ab", "b"]);
    assert_eq!(names("a.", ""), ["a.1", "a.2", "a.3"]);
    assert_eq!(names("a.", "a.2"), ["a.2", "a.3"]);
    assert_eq!(names("a.", "a.9"), [""; 0]);
    assert_eq!(names("c", ""), [""; 0]);
    assert_eq!(cluster.state.topics("a.").count(), 3);
}

#[test]
fn version_grows_with_client_visible_changes() {
    let mut cluster = cluster();
    let register = |endpoint: &str| ClusterCommand::RegisterNode {
        node_id: 1,
        endpoint: endpoint.to_owned(),
        version: "0.1.0".to_owned(),
        peer_addr: String::new(),
    };
    let commands = [
        (register("a:1"), true),
        (register("a:1"), false),
        (register("a:2"), true),
        (register_shards(vec![2, 3]), false),
        (register_shards(vec![3, 4]), true),
        (create("a", 1), true),
        (create("a", 1), false),
        (init("p"), false),
        (lease_to(10, ProducerOwner::ANONYMOUS), false),
        (add("a", 1), false),
        (add("a", 2), true),
        (delete("a"), true),
        (delete("a"), false),
    ];
    for (command, grows) in commands {
        let (before, name) = (cluster.state.version(), command.name());
        cluster.apply(command);
        assert_eq!(cluster.state.version() > before, grows, "{name}");
    }
    assert_eq!(cluster.state.node(1).map(|node| &*node.endpoint), Some("a:2"));
    let empty = String::new();
    let zero = ClusterCommand::RegisterNode {
        node_id: 0,
        endpoint: empty.clone(),
        version: empty.clone(),
        peer_addr: empty,
    };
    cluster.invalid(zero, "node_id");
    cluster.invalid(register_shards(vec![5, 0]), "shards");
    assert!(cluster.state.shards().iter().eq(&[1, 2, 3, 4]));
}

#[test]
fn producer_ids_are_unique_and_stable_per_name() {
    let limits = ClusterLimits { named_producers_max: 2, ..ClusterLimits::default() };
    let mut cluster = Cluster::new(limits);
    let lease = |count| lease_to(count, ProducerOwner::ANONYMOUS);
    assert_eq!(cluster.apply(lease(10)), ClusterReply::ProducerIds { first: 1, count: 10 });
    let producer = |producer_id, epoch| ClusterReply::Producer { producer_id, epoch };
    assert_eq!(cluster.apply(init("a")), producer(11, 0));
    assert_eq!(cluster.apply(init("b")), producer(12, 0));
    assert_eq!(cluster.apply(init("a")), producer(11, 1));
    assert_eq!(cluster.apply(lease(1)), ClusterReply::ProducerIds { first: 13, count: 1 });
    // Evicts b, the least recently used one.
    assert_eq!(cluster.apply(init("c")), producer(14, 0));
    assert_eq!(cluster.apply(init("a")), producer(11, 2));
    assert_eq!(cluster.apply(init("b")), producer(15, 0));
    assert_eq!(cluster.state.named.len(), 2);
    // Epochs of a, of ids without a name, and of names that are no longer remembered.
    let issued = |id: u64| {
        let is_issued = |epoch| cluster.state.check_identity(&ProducerStamp::new(id, epoch, 0));
        [0, 1, 2, 3, u32::MAX].map(|epoch| is_issued(epoch).is_ok())
    };
    assert_eq!(issued(11), [true, true, true, false, false]);
    assert_eq!(issued(15), [true, false, false, false, false]);
    for id in [1, 12, 13, 14] {
        assert_eq!(issued(id), [true; 5], "the owner counts the epochs of {id}");
    }
    assert_eq!(issued(16), [false; 5]);
    cluster.state.named.get_mut("a").unwrap().epochs.newest = u32::MAX;
    assert_eq!(cluster.apply(init("a")), producer(16, 0));
    cluster.invalid(lease(0), "count");
    cluster.invalid(init(""), "producer_name");
    cluster.invalid(init(&"x".repeat(256)), "producer_name");
    cluster.state.next_producer_id = u64::MAX;
    cluster.invalid(lease(1), "count");
}

#[test]
fn identities_belong_to_the_principal_that_got_them() {
    let limits = ClusterLimits { named_producers_max: 4, ..ClusterLimits::default() };
    let mut cluster = Cluster::new(limits);
    let [alice, bob] = ["alice", "bob"].map(ProducerOwner::of);
    let anonymous = ProducerOwner::ANONYMOUS;
    let check = |cluster: &Cluster, producer_id, epoch, owner| {
        let checksum = Some(BatchChecksum::of_crc(1));
        let stamp = ProducerStamp { owner, checksum, ..ProducerStamp::new(producer_id, epoch, 0) };
        cluster.state.check_identity(&stamp)
    };
    let unknown = |producer_id| Err(Refusal::UnknownProducer { producer_id });
    let not_owned = |producer_id| Err(Refusal::ProducerNotOwned { producer_id });
    // Ids 1..=10 are from before there were owners.
    cluster.apply(lease_to(10, anonymous));
    assert!(cluster.state.id_owners.is_empty());
    cluster.apply(lease_to(10, alice));
    cluster.apply(lease_to(10, alice));
    cluster.apply(lease_to(10, bob));
    assert_eq!(cluster.state.id_owners.len(), 3, "neighbours of one owner are one run");
    for (id, of_alice, of_bob, of_anonymous) in [
        (10, unknown(10), unknown(10), Ok(())),
        (11, Ok(()), not_owned(11), not_owned(11)),
        (30, Ok(()), not_owned(30), not_owned(30)),
        (31, not_owned(31), Ok(()), not_owned(31)),
        (41, unknown(41), unknown(41), unknown(41)),
    ] {
        assert_eq!(check(&cluster, id, 0, alice), of_alice);
        assert_eq!(check(&cluster, id, 0, bob), of_bob);
        assert_eq!(check(&cluster, id, 0, anonymous), of_anonymous);
        // The owner of an id without a name counts its epochs.
        for (owner, at_0) in [(alice, of_alice), (bob, of_bob), (anonymous, of_anonymous)] {
            let at_epoch = if at_0.is_ok() { Ok(()) } else { unknown(id) };
            assert_eq!(check(&cluster, id, 7, owner), at_epoch, "{id}");
        }
    }
    // A name that changes hands: alice has the epochs 0 and 1, bob 2, alice 3 and 4.
    for owner in [alice, alice, bob] {
        cluster.apply(init_by("name", owner));
    }
    let id = 41;
    let fenced = |epoch, current_epoch| {
        Err(Refusal::ProducerFenced { producer_id: id, epoch, current_epoch })
    };
    assert_eq!(check(&cluster, id, 1, alice), fenced(1, 2));
    assert_eq!(check(&cluster, id, 2, alice), not_owned(id));
    assert_eq!(check(&cluster, id, 2, bob), Ok(()));
    for _ in 0..2 {
        cluster.apply(init_by("name", alice));
    }
    assert_eq!(check(&cluster, id, 2, bob), fenced(2, 4));
    assert_eq!([3, 4].map(|epoch| check(&cluster, id, epoch, alice)), [Ok(()), Ok(())]);
    assert_eq!(check(&cluster, id, 4, bob), not_owned(id));
    assert_eq!(check(&cluster, id, 5, alice), unknown(id));
    assert_eq!(ClusterState::decode(&cluster.state.encode()).as_ref(), Ok(&cluster.state));
    // The oldest runs are forgotten: their ids are unknown to every caller.
    for owner in [bob, alice, bob] {
        cluster.apply(lease_to(1, owner));
    }
    assert_eq!(cluster.state.id_owners.len(), 4);
    assert_eq!(check(&cluster, 11, 0, alice), unknown(11));
    assert_eq!(check(&cluster, 31, 0, bob), unknown(31));
    assert_eq!(ClusterState::decode(&cluster.state.encode()).as_ref(), Ok(&cluster.state));
}

#[test]
fn shard_0_rejects_batches_and_ignores_shard_commands() {
    let mut state = ClusterState::new(ClusterLimits::default());
    let before = state.clone();
    let partition = PartitionId(1);
    let batch = Head::Batch(batch_head(partition.0, 1));
    let refused = Verdict::Refused(Refusal::UnknownPartition { partition });
    assert_eq!(state.apply(1, &batch), refused);
    let drop = ShardCommand::DropTopic { cluster_version: 1, topic_id: 1 };
    assert_eq!(state.apply(2, &Head::Shard(drop)), Verdict::Nothing);
    assert_eq!(state, before);
}

fn random_command(rng: &mut StdRng) -> ClusterCommand {
    let name = format!("topic-{}", rng.random_range(0..8));
    match rng.random_range(0..12) {
        0 => ClusterCommand::RegisterNode {
            node_id: rng.random_range(0..4),
            endpoint: name,
            version: rng.random_range(0..3).to_string(),
            peer_addr: String::new(),
        },
        1..3 => create(&name, rng.random_range(0..200)),
        3 => ClusterCommand::UpdateTopic {
            name,
            topic_id: rng.random_range(0..4),
            settings: crate::log::testing::any_settings(rng),
            fields: SettingsMask(rng.random_range(0..80)),
        },
        4 => add(&name, rng.random_range(0..300)),
        5 => delete(&name),
        6 => lease_to(rng.random_range(0..100), random_owner(rng)),
        7 => register_shards(vec![rng.random_range(4..9), 1, 2, 3]),
        8..11 => ClusterCommand::Access(random_access_command(rng)),
        _ => init_by(&name, random_owner(rng)),
    }
}

fn random_owner(rng: &mut StdRng) -> ProducerOwner {
    match rng.random_range(0..3) {
        0 => ProducerOwner::ANONYMOUS,
        n => ProducerOwner::of(&format!("p{n}")),
    }
}

fn random_access_command(rng: &mut StdRng) -> AccessCommand {
    let principal = format!("p{}", rng.random_range(0..4));
    let kind = ResourceKind::ALL[rng.random_range(0..4)];
    let operation = AccessOperation::ALL[rng.random_range(0..8)];
    let name = ["", "a", "ab"][rng.random_range(0..3)];
    let rules = vec![AccessRule::new(kind, name, rng.random_range(0..2) == 0, &[operation])];
    match rng.random_range(0..6) {
        0 => {
            let id = rng.random_range(0..6);
            let token = TokenRecord {
                id,
                principal,
                salt: vec![1; 16],
                hash: vec![2; 32],
                created_at_us: 3,
                expires_at_us: rng.random_range(0..3),
            };
            let is_first = rng.random_range(0..2) == 0;
            AccessCommand::CreateToken(CreateToken { token: Some(token), rules, is_first })
        }
        1 => AccessCommand::RevokeToken(rng.random_range(0..6)),
        2 => AccessCommand::RevokeTokens(principal),
        3 => AccessCommand::Remove(PrincipalRules { principal, rules }),
        4 => AccessCommand::SetQuota(QuotaLimits {
            principal,
            connections: rng.random_range(0..3),
            requests_per_second: rng.random_range(0..3),
            ..QuotaLimits::default()
        }),
        _ => AccessCommand::Allow(PrincipalRules { principal, rules }),
    }
}

fn check_invariants(state: &ClusterState) {
    assert_eq!(state.topics.len(), state.names.len());
    assert_eq!(state.named.len(), state.names_by_use.len());
    let epochs = state.named.values().map(|it| (it.producer_id, it.epochs));
    assert_eq!(state.epochs, epochs.collect());
    assert!(state.named.len() <= state.limits.named_producers_max as usize);
    let sum: u64 = state.all_topics().map(|topic| u64::from(topic.partition_count)).sum();
    assert_eq!(sum, state.partition_count());
    assert!(sum <= state.limits.partitions_max);
    let mut ids: Vec<_> = state.all_topics().flat_map(|topic| topic.locations()).collect();
    ids.sort_by_key(|location| location.partition);
    ids.dedup_by_key(|location| location.partition);
    assert_eq!(ids.len() as u64, sum);
}

#[test]
fn random_logs_keep_invariants_and_checkpoints_are_exact() {
    let mut rng = seeded("random_logs_keep_invariants_and_checkpoints_are_exact");
    let limits = ClusterLimits {
        partitions_per_topic_max: 250,
        partitions_max: 1_000,
        named_producers_max: 5,
    };
    for _ in 0..20 {
        let mut state = ClusterState::new(limits);
        let mut replayed = ClusterState::new(limits);
        let mut restored = ClusterState::new(limits);
        for index in 1..400 {
            let head = Head::Cluster(random_command(&mut rng));
            let before = state.clone();
            let verdict = state.apply(index, &head);
            if let Verdict::Cluster(
                ClusterReply::Invalid { .. } | ClusterReply::TopicNotFound { .. },
            ) = verdict
            {
                assert_eq!(state, before);
            }
            assert_eq!(restored.apply(index, &head), verdict);
            replayed.apply(index, &head);
            if index % 50 == 0 {
                restored = ClusterState::decode(&state.encode()).expect("its own bytes");
                assert_eq!(restored, state);
                check_invariants(&state);
            }
        }
        assert_eq!(replayed.encode(), state.encode());
        assert_eq!(restored.encode(), state.encode());
    }
}

#[test]
fn decoding_a_damaged_checkpoint_never_panics() {
    let mut rng = seeded("decoding_a_damaged_checkpoint_never_panics");
    assert!(ClusterState::decode(&[]).is_err());
    let mut cluster = cluster();
    for _ in 0..100 {
        cluster.apply(random_command(&mut rng));
    }
    let bytes = cluster.state.encode();
    for _ in 0..5_000 {
        let mut bytes = bytes.to_vec();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << rng.random_range(0..8);
        }
        let _ = ClusterState::decode(&bytes);
    }
}

#[test]
fn access_control_raises_the_version_only_if_it_changes() {
    let mut cluster = cluster();
    let (before, bytes) = (cluster.state.version(), cluster.state.encode());
    let rule = AccessRule::new(ResourceKind::Topic, "a", false, &[AccessOperation::Read]);
    let change = PrincipalRules { principal: "p".to_owned(), rules: vec![rule] };
    let allow = || ClusterCommand::Access(AccessCommand::Allow(change.clone()));
    assert_eq!(cluster.apply(allow()), ClusterReply::Done);
    assert_eq!(cluster.apply(allow()), ClusterReply::Done);
    assert_eq!(cluster.state.version(), before + 1);
    let restored = ClusterState::decode(&cluster.state.encode()).unwrap();
    assert_eq!(restored, cluster.state);
    let remove = ClusterCommand::Access(AccessCommand::Remove(change.clone()));
    assert_eq!(cluster.apply(remove), ClusterReply::Done);
    assert_eq!(cluster.state.version(), before + 2);
    // Without tokens and rules the state has the form of the version before.
    assert_eq!(cluster.state.encode().len(), bytes.len());
}

#[test]
fn groups_stay_in_their_shards_when_shards_are_added() {
    let mut cluster = Cluster::new(ClusterLimits::default());
    let shards = |cluster: &Cluster| -> Vec<Option<u64>> {
        (0..1_000).map(|i| cluster.state.group_shard(&format!("group-{i}"))).collect()
    };
    assert_eq!(shards(&cluster), vec![None; 1_000]);
    let before = ClusterState::decode(&cluster.state.encode()).unwrap();
    assert_eq!(before, cluster.state);
    assert_eq!(cluster.apply(ClusterCommand::AssignGroupSlots), ClusterReply::Done);
    let (assigned, version) = (shards(&cluster), cluster.state.version());
    for shard in 1..=3 {
        let count = assigned.iter().filter(|it| **it == Some(shard)).count();
        assert!(count > 250, "{count} of 1,000 groups are in shard {shard}");
    }
    cluster.apply(register_shards(vec![4, 5]));
    assert_eq!(cluster.apply(ClusterCommand::AssignGroupSlots), ClusterReply::Done);
    assert_eq!(cluster.state.version(), version + 1, "the second assignment changed nothing");
    assert_eq!(shards(&cluster), assigned);
    let restored = ClusterState::decode(&cluster.state.encode()).unwrap();
    assert_eq!(restored, cluster.state);
    // The hash is permanent.
    assert_eq!(cluster.state.group_shard("readers"), Some(3));
}
