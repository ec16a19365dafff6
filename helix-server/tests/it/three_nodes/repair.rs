//! A replica whose log may have lost acknowledged entries is rebuilt from the others. No acked
//! record is lost, and the replica does not vote before it has everything that it acknowledged.
//! SimulatedTrio nodes on simulated disks, one of which is damaged.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use helix_server::error::Error;
use helix_server::log::ProducerOwner;
use helix_server::node::{LogLimits, Node, NodeSettings};
use helix_server::shard::{Durability, ReadFrom, Watcher};
use helix_wal::storage::SimulatedDisk;

use crate::simulated_trio::{Disks, SHARD, SimulatedTrio, one_record};
use crate::simulation::settings_on;
use crate::support::soon;
use crate::trio::{NODES, until};

/// Several times as long as a quick election takes.
const ELECTIONS: Duration = Duration::from_millis(2_500);

/// A checkpoint every few segments, and no purging meanwhile.
const LIMITS: LogLimits =
    LogLimits { checkpoint_bytes: 1 << 20, catch_up_bytes: 64 << 20, ..LogLimits::DEFAULT };

/// Files of the log with this ending, oldest first.
fn files(disk: &SimulatedDisk, ending: &str) -> Vec<String> {
    let mut names = disk.files();
    names.retain(|name| name.ends_with(ending) && !name.starts_with("aside"));
    names.sort_unstable();
    names
}

/// Flips a bit in the middle of the first batch of a segment. Batches are runs of one byte.
fn flip_bit(disk: &SimulatedDisk, segment: &str) {
    let bytes = disk.read_file(segment).expect("it is there");
    let is_batch = |run: &[u8]| run.iter().all(|byte| *byte == run[0]) && run[0] != 0;
    let batch = bytes.windows(2000).position(is_batch).expect("it has a batch");
    disk.flip_bit(segment, (batch as u64 + 1000) * 8);
}

/// Flips a bit in the frame header of the first batch of a segment, which a replay reads.
fn flip_header_bit(disk: &SimulatedDisk, segment: &str) {
    let bytes = disk.read_file(segment).expect("it is there");
    let is_batch = |run: &[u8]| run.iter().all(|byte| *byte == run[0]) && run[0] != 0;
    let batch = bytes.windows(2000).position(is_batch).expect("it has a batch");
    // A frame states its own position, as a number of four bytes.
    let states_itself = |at: &usize| {
        bytes[at + 16..at + 20] == u32::try_from(*at).expect("segments are small").to_le_bytes()
    };
    let frame = (0..=batch / 8).rev().map(|at| at * 8).find(states_itself).expect("a frame");
    disk.flip_bit(segment, (frame as u64 + 24) * 8);
}

/// Flips a bit in the frame header of an entry of a sealed segment, by its number in the index
/// table of docs/wal-format.md.
fn flip_entry_bit(disk: &SimulatedDisk, segment: &str, number: usize) {
    let bytes = disk.read_file(segment).expect("it is there");
    let trailer = bytes.len() - 4096;
    assert!(bytes[trailer..].starts_with(b"HLXTRAIL"), "{segment} is sealed");
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let footer = u64::from_le_bytes(bytes[trailer + 72..trailer + 80].try_into().unwrap());
    let page = footer + u64::from(u32_at(trailer + 80)) * 4096;
    let row = usize::try_from(page).unwrap() + 24 + number * 32;
    disk.flip_bit(segment, (u64::from(u32_at(row + 16)) + 24) * 8);
}

/// Reads every record of a node's replica. What cannot be read is left out.
async fn read_all(three: &SimulatedTrio, node: u64, end: u64) {
    let Ok(located) = three.nodes[&node].locate("default", 0) else { return };
    for offset in 0..end {
        let read = located.shard.read(located.partition, offset, None, 1, ReadFrom::AnyReplica);
        // Ignored: the damage is noted, and the next read may go further.
        let _ = read.await;
    }
}

fn count_of(counts: Vec<(u64, u64)>) -> u64 {
    counts.into_iter().find(|(shard, _)| *shard == SHARD).map_or(0, |(_, count)| count)
}

/// The segments of a node's replica that were repaired in place.
fn repaired(three: &SimulatedTrio, node: u64) -> u64 {
    count_of(three.nodes[&node].repaired_segments())
}

fn restarts(three: &SimulatedTrio, node: u64) -> u64 {
    count_of(three.nodes[&node].restarts())
}

/// Appends until every replica has some sealed segments. Returns the number of records.
async fn with_sealed_segments(three: &SimulatedTrio) -> u64 {
    let mut count = 0;
    until("there are sealed segments", async || {
        for _ in 0..30 {
            three.append(count).await;
            count += 1;
        }
        let has_some = |node: u64| files(&three.disks.of(node, SHARD), ".seg").len() > 4;
        three.nodes.keys().all(|node| has_some(*node)).then_some(())
    })
    .await;
    for node in three.nodes.keys() {
        three.stored(*node, count).await;
    }
    count
}

/// Writes to the log of shard 0 until every replica has sealed its first segment. No checkpoint
/// covers these few large entries.
async fn with_sealed_cluster_log(three: &SimulatedTrio) {
    let is_sealed = |node: &u64| {
        let disk = three.disks.of(*node, 0);
        let first = files(&disk, ".seg").first().and_then(|name| disk.read_file(name));
        first.is_some_and(|bytes| bytes[bytes.len() - 4096..].starts_with(b"HLXTRAIL"))
    };
    let name = "p".repeat(32 << 10);
    until("the first segments are sealed", async || {
        let leader = three.first().await;
        for _ in 0..50 {
            // Ignored: only the size of the log counts.
            let _ = leader.cluster().init_producer(&name, ProducerOwner::ANONYMOUS).await;
        }
        NODES.iter().all(is_sealed).then_some(())
    })
    .await;
}

/// Damages one segment of each of these replicas, and waits until all are whole again. No replica
/// gives up its log or stops.
async fn damaged_and_repaired(three: &SimulatedTrio, hurt: &[(u64, usize)], count: u64) {
    for (node, segment) in hurt {
        let disk = three.disks.of(*node, SHARD);
        flip_bit(&disk, &files(&disk, ".seg")[*segment]);
    }
    for (node, _) in hurt {
        until("the damage is met, and repaired", async || {
            read_all(three, *node, count).await;
            (repaired(three, *node) > 0).then_some(())
        })
        .await;
    }
    for (node, _) in hurt {
        whole_again(three, *node).await;
        assert_eq!(restarts(three, *node), 0, "node {node} kept its log");
    }
    three.append(count).await;
    three.expect_equal(count + 1).await;
}

#[tokio::test]
async fn damage_to_leader_and_follower_is_repaired_from_each_other_and_the_third() {
    let three = SimulatedTrio::start(LIMITS).await;
    let count = with_sealed_segments(&three).await;
    let leader = three.leader().await;
    let follower = NODES.into_iter().find(|id| *id != leader).unwrap();
    damaged_and_repaired(&three, &[(leader, 0), (follower, 1)], count).await;
    three.stop_all().await;
}

#[tokio::test]
async fn damage_to_all_three_replicas_in_different_blocks_is_repaired() {
    let three = SimulatedTrio::start(LIMITS).await;
    let count = with_sealed_segments(&three).await;
    let hurt: Vec<(u64, usize)> = NODES.into_iter().zip([0, 1, 2]).collect();
    damaged_and_repaired(&three, &hurt, count).await;
    three.stop_all().await;
}

/// Neither of the two may stay with the other as its source.
#[tokio::test]
async fn entry_damaged_on_two_replicas_is_repaired_from_the_third() {
    let three = SimulatedTrio::start(LIMITS).await;
    let count = with_sealed_segments(&three).await;
    damaged_and_repaired(&three, &[(1, 0), (2, 0)], count).await;
    three.stop_all().await;
}

/// The majority that is left must stay one: the damaged replica keeps its log and its vote.
#[tokio::test]
async fn damage_while_another_replica_is_away_takes_no_majority_away() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    let count = with_sealed_segments(&three).await;
    let leader = three.leader().await;
    let away = NODES.into_iter().find(|id| *id != leader).unwrap();
    three.stop(away).await;
    damaged_and_repaired(&three, &[(leader, 0)], count).await;
    three.restart(away).await;
    three.expect_equal(count + 1).await;
    three.stop_all().await;
}

/// Two of three replicas cannot be replayed. Were both logs given up, the third replica could not
/// be elected.
#[tokio::test]
async fn damage_met_by_the_replays_of_two_logs_is_repaired_in_place() {
    let limits = LogLimits { checkpoint_bytes: 64 << 20, ..LIMITS };
    let mut three = SimulatedTrio::start(limits).await;
    let count = with_sealed_segments(&three).await;
    let leader = three.leader().await;
    let follower = NODES.into_iter().find(|id| *id != leader).unwrap();
    for (node, segment) in [(leader, 0), (follower, 1)] {
        three.stop(node).await;
        let disk = three.disks.of(node, SHARD);
        flip_header_bit(&disk, &files(&disk, ".seg")[segment]);
    }
    for node in [leader, follower] {
        three.restart(node).await;
        assert!(three.nodes[&node].in_repair().is_empty(), "node {node} kept its log");
    }
    for node in [leader, follower] {
        whole_again(&three, node).await;
        assert_eq!(repaired(&three, node), 1, "node {node}");
    }
    three.append(count).await;
    three.expect_equal(count + 1).await;
    three.stop_all().await;
}

/// Two logs cannot be replayed, and the third replica is away: there is no leader. Each of the two
/// sends the other what it lacks.
#[tokio::test]
async fn two_logs_that_cannot_be_replayed_repair_each_other_without_a_leader() {
    let limits = LogLimits { checkpoint_bytes: 64 << 20, ..LIMITS };
    let mut three = SimulatedTrio::start(limits).await;
    let count = with_sealed_segments(&three).await;
    for node in NODES {
        three.stop(node).await;
    }
    for (node, segment) in [(1, 0), (2, 1)] {
        let disk = three.disks.of(node, SHARD);
        flip_header_bit(&disk, &files(&disk, ".seg")[segment]);
        three.restart(node).await;
    }
    for node in [1, 2] {
        whole_again(&three, node).await;
        assert_eq!(repaired(&three, node), 1, "node {node}");
    }
    three.append(count).await;
    three.restart(3).await;
    three.expect_equal(count + 1).await;
    three.stop_all().await;
}

/// The same with the logs of shard 0, without which neither node starts.
#[tokio::test]
async fn two_cluster_logs_that_cannot_be_replayed_repair_each_other_without_a_leader() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    with_sealed_cluster_log(&three).await;
    for node in NODES {
        three.stop(node).await;
    }
    let mut whole = Vec::new();
    for (node, number) in [(1, 40), (2, 41)] {
        let disk = three.disks.of(node, 0);
        let segment = files(&disk, ".seg")[0].clone();
        whole.push((node, segment.clone(), disk.read_file(&segment)));
        flip_entry_bit(&disk, &segment, number);
    }
    three.restart_all(&[1, 2]).await;
    for (node, segment, bytes) in whole {
        whole_again(&three, node).await;
        assert!(three.disks.of(node, 0).read_file(&segment) == bytes, "node {node} repaired it");
    }
    three.append(0).await;
    three.stop_all().await;
}

/// openraft needs the id of the first entry at each start. The entry itself may be purged on all
/// other replicas, so that nothing could repair it.
#[tokio::test]
async fn start_needs_no_entry_that_a_checkpoint_covers() {
    let disks = Disks::default();
    let node = open_single_node(&disks, 0).await;
    append_to(&node).await;
    let shard = node.shard(SHARD).unwrap();
    until("there is a checkpoint", async || (shard.replica().checkpointed().0 > 0).then_some(()))
        .await;
    assert_eq!(shard.replica().checkpointed().1, 0, "nothing is purged");
    drop(shard);
    node.close().await;
    let disk = disks.of(1, SHARD);
    flip_entry_bit(&disk, &files(&disk, ".seg")[0], 0);
    let node = open_single_node(&disks, 0).await;
    let shard = node.shard(SHARD).expect("its replay does not need the entry");
    let partition = node.locate("default", 0).unwrap().partition;
    let read = shard.read(partition, 149, None, 1, ReadFrom::Leader).await;
    assert_eq!(read.unwrap().next_offset, 150);
    drop(shard);
    node.close().await;
}

/// The first entry of a log has the index 0.
#[tokio::test]
async fn damage_to_the_first_entry_is_repaired_in_place() {
    let limits = LogLimits { checkpoint_bytes: 64 << 20, ..LIMITS };
    let mut three = SimulatedTrio::start(limits).await;
    let count = with_sealed_segments(&three).await;
    three.stop(2).await;
    let disk = three.disks.of(2, SHARD);
    flip_entry_bit(&disk, &files(&disk, ".seg")[0], 0);
    three.restart(2).await;
    whole_again(&three, 2).await;
    assert_eq!(repaired(&three, 2), 1);
    three.append(count).await;
    three.expect_equal(count + 1).await;
    three.stop_all().await;
}

async fn whole_again(three: &SimulatedTrio, node: u64) {
    until("the replica is whole again", async || {
        let node = &three.nodes[&node];
        let is_whole = node.shard(SHARD).is_some_and(|shard| shard.damage().is_empty())
            && node.in_repair().is_empty()
            && node.stopped().is_empty()
            && node.unready().is_empty();
        is_whole.then_some(())
    })
    .await;
}

/// Damages a shard's disk while its node is down.
type Damage = fn(&SimulatedDisk);

fn damage_newest_segment(disk: &SimulatedDisk) {
    flip_bit(disk, files(disk, ".seg").last().expect("there is one"));
}

fn damage_state_file(disk: &SimulatedDisk) {
    disk.flip_bit("state", 30 * 8);
}

fn remove_oldest_segment(disk: &SimulatedDisk) {
    disk.remove_file(files(disk, ".seg").first().expect("there is one"));
}

fn remove_everything(disk: &SimulatedDisk) {
    for name in disk.files() {
        disk.remove_file(&name);
    }
}

#[tokio::test]
async fn damaged_replica_is_rebuilt_from_the_others() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    let mut count = 0;
    let damages: [(&str, Damage); 4] = [
        ("a group of the newest segment", damage_newest_segment),
        ("the state file", damage_state_file),
        ("a removed segment", remove_oldest_segment),
        ("a removed directory", remove_everything),
    ];
    for (what, damage) in damages {
        for _ in 0..60 {
            three.append(count).await;
            count += 1;
        }
        let leader = three.leader().await;
        let hurt = NODES.into_iter().find(|id| *id != leader).unwrap();
        three.stored(hurt, count).await;
        three.stop(hurt).await;
        damage(&three.disks.of(hurt, SHARD));
        three.append(count).await;
        count += 1;
        three.restart(hurt).await;
        // A replica without a log first learns that it is still part of its shard.
        let has_log = !three.disks.of(hurt, SHARD).files().is_empty();
        let repaired = three.nodes[&hurt].in_repair();
        let is_repaired = repaired.iter().any(|(shard, _)| *shard == SHARD);
        assert!(is_repaired || !has_log, "{what}: {repaired:?}");
        whole_again(&three, hurt).await;
        three.expect_equal(count).await;
        let left = three.disks.of(hurt, SHARD).files();
        let is_left = |name: &String| name.starts_with("aside") || name == "repair";
        assert!(!left.iter().any(is_left), "{what}: {left:?}");
        // The replica serves its records after a restart, too.
        three.stop(hurt).await;
        three.restart(hurt).await;
        whole_again(&three, hurt).await;
        three.expect_equal(count).await;
    }
    three.stop_all().await;
}

#[tokio::test]
async fn damaged_cluster_log_is_rebuilt() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    three.append(0).await;
    let hurt = NODES.into_iter().find(|id| !three.nodes[id].cluster().is_leader()).unwrap();
    three.stop(hurt).await;
    damage_state_file(&three.disks.of(hurt, 0));
    three.restart(hurt).await;
    assert_eq!(three.nodes[&hurt].in_repair().first().map(|(shard, _)| *shard), Some(0));
    whole_again(&three, hurt).await;
    three.expect_equal(1).await;
    three.stop_all().await;
}

/// Shard 0 states whether other nodes have replicas, but it has stopped as well.
#[tokio::test]
async fn damage_met_while_shard_0_is_stopped_is_repaired() {
    let three = SimulatedTrio::start(LIMITS).await;
    for number in 0..10 {
        three.append(number).await;
    }
    let leader = three.leader().await;
    let hurt = NODES.into_iter().find(|id| *id != leader).unwrap();
    three.stored(hurt, 10).await;
    let node = &three.nodes[&hurt];
    let (own, shard) = (node.cluster().replica(), node.shard(SHARD).expect("it is open"));
    tokio::join!(own.close(), shard.replica().close());
    damage_state_file(&three.disks.of(hurt, SHARD));
    until("the shard is open again", async || (restarts(&three, hurt) > 0).then_some(())).await;
    whole_again(&three, hurt).await;
    three.expect_equal(10).await;
    three.stop_all().await;
}

#[tokio::test]
async fn log_without_identity_is_recognized_by_the_nodes_other_logs() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    three.append(0).await;
    let hurt = NODES.into_iter().find(|id| !three.nodes[id].cluster().is_leader()).unwrap();
    three.stop(hurt).await;
    let disk = three.disks.of(hurt, 0);
    damage_state_file(&disk);
    for segment in files(&disk, ".seg") {
        // In its header.
        disk.flip_bit(&segment, 4 * 8);
    }
    three.restart(hurt).await;
    assert_eq!(three.nodes[&hurt].in_repair().first().map(|(shard, _)| *shard), Some(0));
    whole_again(&three, hurt).await;
    three.expect_equal(1).await;
    three.stop_all().await;
}

/// Two of three replicas have an acked record, and one of them loses it. Together with the replica
/// that never had it, it would be a majority.
#[tokio::test]
async fn replica_that_lost_acked_entries_does_not_vote() {
    let mut three = SimulatedTrio::start_hasty(LIMITS).await;
    three.append(0).await;
    let leader = three.leader().await;
    let others: Vec<u64> = NODES.into_iter().filter(|id| *id != leader).collect();
    let (behind, hurt) = (others[0], others[1]);
    three.stored(behind, 1).await;
    three.stored(hurt, 1).await;
    three.stop(behind).await;
    for number in 1..5 {
        three.append(number).await;
    }
    three.stored(hurt, 5).await;
    three.stop(hurt).await;
    three.stop(leader).await;
    damage_newest_segment(&three.disks.of(hurt, SHARD));
    three.restart(behind).await;
    three.restart(hurt).await;
    let elected = tokio::time::timeout(ELECTIONS, async {
        until("a node is elected", async || {
            let is_leader =
                |id: &u64| three.nodes[id].shard(SHARD).is_some_and(|it| it.is_leader());
            [behind, hurt].iter().find(|id| is_leader(id)).copied()
        })
        .await
    });
    assert!(elected.await.is_err(), "a leader without the acked record was elected");
    assert!(three.nodes[&hurt].in_repair().iter().any(|(shard, _)| *shard == SHARD));
    // It does not serve either: its commit index would be lower than before.
    let shard = three.nodes[&hurt].shard(SHARD).expect("it is open");
    let refused = shard.ready_for(ReadFrom::AnyReplica).await;
    assert!(matches!(refused, Err(Error::NoLeader { .. })), "{refused:?}");
    three.restart(leader).await;
    whole_again(&three, hurt).await;
    three.append(5).await;
    three.expect_equal(6).await;
    three.stop_all().await;
}

/// The last vote in its log was for itself, and it had won that election.
#[tokio::test]
async fn leader_that_lost_its_log_is_not_leader_without_it() {
    let mut three = SimulatedTrio::start_hasty(LIMITS).await;
    for number in 0..60 {
        three.append(number).await;
    }
    let hurt = three.leader().await;
    for node in NODES {
        three.stored(node, 60).await;
    }
    // The leader stops last, so that it transfers leadership to no node.
    let others = NODES.into_iter().filter(|id| *id != hurt);
    for node in others.clone().chain([hurt]) {
        three.stop(node).await;
    }
    // The end of the log, with the vote, is intact.
    remove_oldest_segment(&three.disks.of(hurt, SHARD));
    three.restart(hurt).await;
    assert!(three.nodes[&hurt].in_repair().iter().any(|(shard, _)| *shard == SHARD));
    let led = tokio::time::timeout(ELECTIONS, async {
        until("the node is the leader", async || three.shard(hurt).is_leader().then_some(())).await;
    });
    assert!(led.await.is_err(), "a leader without the acked records was elected");
    for node in others {
        three.restart(node).await;
    }
    whole_again(&three, hurt).await;
    three.expect_equal(60).await;
    three.stop_all().await;
}

/// A node that is stopped during its repair resumes it.
#[tokio::test]
async fn interrupted_repair_is_resumed() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    for number in 0..30 {
        three.append(number).await;
    }
    let leader = three.leader().await;
    let others: Vec<u64> = NODES.into_iter().filter(|id| *id != leader).collect();
    let (away, hurt) = (others[0], others[1]);
    three.stored(hurt, 30).await;
    three.stored(away, 30).await;
    three.stop(hurt).await;
    three.stop(away).await;
    damage_state_file(&three.disks.of(hurt, SHARD));
    three.restart(hurt).await;
    until("it waits for the absent node", async || {
        let repair = three.nodes[&hurt].in_repair();
        let waits = format!("node {away}");
        repair.iter().any(|(_, what)| what.contains(&waits)).then_some(())
    })
    .await;
    three.stop(hurt).await;
    three.restart(hurt).await;
    assert!(!three.nodes[&hurt].in_repair().is_empty(), "the repair is remembered");
    three.restart(away).await;
    whole_again(&three, hurt).await;
    three.expect_equal(30).await;
    three.stop_all().await;
}

/// Damage that is found by a read while the replica runs.
#[tokio::test]
async fn damage_found_by_a_read_is_repaired() {
    let three = SimulatedTrio::start(LIMITS).await;
    let mut count = 0;
    let leader = three.leader().await;
    until("there are sealed segments", async || {
        for _ in 0..30 {
            three.append(count).await;
            count += 1;
        }
        (files(&three.disks.of(leader, SHARD), ".seg").len() > 3).then_some(())
    })
    .await;
    // Also on the leader, which then loses leadership.
    for hurt in [leader, NODES.into_iter().find(|id| *id != leader).unwrap()] {
        three.stored(hurt, count).await;
        let disk = three.disks.of(hurt, SHARD);
        let segment = files(&disk, ".seg")[0].clone();
        let bytes = disk.read_file(&segment).unwrap();
        flip_bit(&disk, &segment);
        let before = repaired(&three, hurt);
        until("a reader meets the damage, and it is repaired", async || {
            read_all(&three, hurt, count).await;
            (repaired(&three, hurt) > before).then_some(())
        })
        .await;
        whole_again(&three, hurt).await;
        assert!(disk.read_file(&segment).unwrap() == bytes, "the segment is what it was");
        assert_eq!(restarts(&three, hurt), 0, "it kept its log and its votes");
        three.expect_equal(count).await;
    }
    three.append(count).await;
    three.expect_equal(count + 1).await;
    three.stop_all().await;
}

/// The reader would wait without end: the old replica object gets no more entries.
#[tokio::test]
async fn reader_waiting_on_a_reopened_replica_is_redirected() {
    let three = SimulatedTrio::start(LIMITS).await;
    let mut count = 0;
    let leader = three.leader().await;
    let hurt = NODES.into_iter().find(|id| *id != leader).unwrap();
    until("there are sealed segments", async || {
        for _ in 0..30 {
            three.append(count).await;
            count += 1;
        }
        (files(&three.disks.of(hurt, SHARD), ".seg").len() > 3).then_some(())
    })
    .await;
    three.stored(hurt, count).await;
    let located = three.nodes[&hurt].locate("default", 0).unwrap();
    let read = async |offset| {
        let (shard, partition) = (&located.shard, located.partition);
        shard.read(partition, offset, None, 1 << 20, ReadFrom::AnyReplica).await
    };
    let watcher = Watcher::new();
    let guard = located.shard.watch(located.partition, 0, &watcher).unwrap();
    assert!(read(count).await.unwrap().batches.is_empty());
    let disk = three.disks.of(hurt, SHARD);
    // Not even the index is left: this is not repaired in place.
    let segment = files(&disk, ".seg")[0].clone();
    let len = disk.read_file(&segment).unwrap().len() as u64;
    disk.zero(&segment, 4096..len - 4096);
    until("the damage is met, and the log is rebuilt", async || {
        // Ignored: what it says is for the next one to read too.
        let _ = read(1).await;
        let restarts = three.nodes[&hurt].restarts();
        restarts.iter().any(|(shard, count)| *shard == SHARD && *count > 0).then_some(())
    })
    .await;
    let redirected = soon(async {
        loop {
            watcher.changed().await;
            if let Err(error) = read(count).await {
                return error;
            }
        }
    });
    let redirected = redirected.await;
    assert!(matches!(redirected, Error::NoLeader { .. }), "{redirected}");
    drop((guard, located));
    whole_again(&three, hurt).await;
    three.expect_equal(count).await;
    three.stop_all().await;
}

/// Damage in records that no client reads.
#[tokio::test]
async fn unread_damage_is_found_by_the_scrub() {
    let mut three = SimulatedTrio::start(LIMITS).await;
    let leader = three.leader().await;
    let hurt = NODES.into_iter().find(|id| *id != leader).unwrap();
    let mut count = 0;
    until("there are sealed segments", async || {
        for _ in 0..30 {
            three.append(count).await;
            count += 1;
        }
        (files(&three.disks.of(hurt, SHARD), ".seg").len() > 3).then_some(())
    })
    .await;
    three.stored(hurt, count).await;
    three.stop(hurt).await;
    let disk = three.disks.of(hurt, SHARD);
    flip_bit(&disk, &files(&disk, ".seg")[0]);
    three.scrub_rate = 1 << 30;
    three.restart(hurt).await;
    until("it is found, and repaired", async || (repaired(&three, hurt) > 0).then_some(())).await;
    whole_again(&three, hurt).await;
    three.expect_equal(count).await;
    three.stop_all().await;
}

async fn open_single_node(disks: &Disks, scrub_rate: u64) -> Arc<Node> {
    let disks = disks.clone();
    let open = Arc::new(move |shard| disks.open(1, shard));
    let settings = NodeSettings { scrub_rate, log_limits: LIMITS, ..settings_on(open, 1) };
    Node::open(settings).await.unwrap()
}

/// Appends 150 batches of one record to a single node.
async fn append_to(node: &Node) {
    let located = node.locate("default", 0).unwrap();
    for number in 0..150 {
        let payload = Bytes::from(vec![number + 1; 20_000]);
        let batch = one_record(located.partition, payload.clone());
        let permit = located
            .shard
            .permit(helix_server::shard::FlowShare::INTERNAL, payload.len())
            .await
            .unwrap();
        located.shard.append(batch, Durability::QuorumSynced, permit).await.unwrap();
    }
}

/// A single replica cannot be rebuilt: reads of damaged records fail and name the file; other reads
/// succeed.
#[tokio::test]
async fn single_node_refuses_damaged_records_and_serves_the_rest() {
    let disks = Disks::default();
    let node = open_single_node(&disks, 1 << 30).await;
    append_to(&node).await;
    node.close().await;
    let disk = disks.of(1, SHARD);
    let spoiled = files(&disk, ".seg")[0].clone();
    flip_bit(&disk, &spoiled);
    let node = open_single_node(&disks, 1 << 30).await;
    let shard = node.shard(SHARD).unwrap();
    until("the damage is found", async || (!shard.damage().is_empty()).then_some(())).await;
    assert!(shard.damage()[0].contains(&spoiled), "{:?}", shard.damage());
    let partition = node.locate("default", 0).unwrap().partition;
    let read = async |offset| shard.read(partition, offset, None, 1, ReadFrom::Leader).await;
    let refused = read(0).await.unwrap_err();
    let names = matches!(&refused, Error::CorruptLog { what } if what.contains(&spoiled));
    assert!(names, "{refused}");
    for offset in 1..150 {
        assert_eq!(read(offset).await.unwrap().next_offset, offset + 1);
    }
    assert!(node.restarts().iter().all(|(_, count)| *count == 0), "{:?}", node.restarts());
    node.close().await;
}

/// The last group cannot be distinguished from one whose write a crash has interrupted.
#[tokio::test]
async fn single_node_serves_what_is_left_without_its_last_group() {
    let disks = Disks::default();
    let node = open_single_node(&disks, 0).await;
    append_to(&node).await;
    // As after a power loss: nothing shows yet that the last group was synced.
    let disk = disks.of(1, SHARD);
    let names = disk.files();
    let copies: Vec<(String, Vec<u8>)> =
        names.into_iter().map(|name| (name.clone(), disk.read_file(&name).unwrap())).collect();
    node.close().await;
    for name in disk.files() {
        disk.remove_file(&name);
    }
    for (name, bytes) in copies {
        disk.write_file(&name, bytes);
    }
    let newest = files(&disk, ".seg").pop().unwrap();
    let bytes = disk.read_file(&newest).unwrap();
    let last = bytes.windows(2000).rposition(|run| run.iter().all(|byte| *byte == 150)).unwrap();
    disk.flip_bit(&newest, last as u64 * 8);
    let node = open_single_node(&disks, 0).await;
    let located = node.locate("default", 0).unwrap();
    let read = async |offset| {
        located.shard.read(located.partition, offset, None, 1, ReadFrom::Leader).await
    };
    for offset in 0..149 {
        assert_eq!(read(offset).await.unwrap().next_offset, offset + 1);
    }
    assert_eq!(read(149).await.unwrap().batches.len(), 0);
    assert!(matches!(read(150).await, Err(Error::CorruptLog { .. })), "it may have been there");
    append_to(&node).await;
    assert_eq!(read(298).await.unwrap().next_offset, 299);
    node.close().await;
}

/// The repair note cannot be read, so the log is not replaced.
#[tokio::test]
async fn groups_of_a_damaged_log_are_elsewhere_unless_the_node_is_single() {
    let spoil = |disk: SimulatedDisk| disk.write_file("repair", b"damaged".to_vec());
    let is_damaged =
        |node: &Node| matches!(node.locate("default", 0), Err(Error::CorruptLog { .. }));
    let mut three = SimulatedTrio::start(LIMITS).await;
    three.first().await.find_or_place_group("readers").await.unwrap();
    let hurt = 3;
    three.stop(hurt).await;
    spoil(three.disks.of(hurt, SHARD));
    three.restart(hurt).await;
    let node = three.nodes[&hurt].clone();
    until("the node finds the damage", async || is_damaged(&node).then_some(())).await;
    until("the node knows where the group is", async || match node.find_group("readers").await {
        Err(Error::ShardClosed { shard: SHARD, .. }) => Some(()),
        Err(Error::CorruptLog { what }) => panic!("final for the caller: {what}"),
        _ => None,
    })
    .await;
    // A commit needs no replica of its partition.
    assert_eq!(node.find_key("default", 0, 0).await.unwrap().number, 0);
    drop(node);
    three.stop_all().await;

    let disks = Disks::default();
    let node = open_single_node(&disks, 0).await;
    node.find_or_place_group("readers").await.unwrap();
    node.close().await;
    spoil(disks.of(1, SHARD));
    let node = open_single_node(&disks, 0).await;
    assert!(is_damaged(&node));
    let refused = node.find_group("readers").await.unwrap_err();
    assert!(matches!(refused, Error::CorruptLog { .. }), "{refused}");
    node.close().await;
}
