//! Growth of the nodes' resident memory by groups, committed offsets and members.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::{AutoCommit, Client};
use helix_proto::log::v1::{CommittedOffset, TopicPartition};
use tokio::time::{Instant, sleep};

use super::plan::{CONCURRENT_GROUPS, GroupBenchPlan, STEP_MAX, TURN};
use super::reads;
use super::row::GroupBenchRow;
use crate::target::delete_groups;

/// Bytes of records that are appended before each reading of the memory, of which the lowest one
/// counts. The first ones take the place of the small entries that the log keeps in memory, and
/// make a checkpoint due. The others have the allocator return the buffers of that checkpoint.
const FILL_BYTES: [u64; 3] = [64 << 20, 8 << 20, 8 << 20];

/// Wait until the nodes have released what calls took.
const REST: Duration = Duration::from_secs(2);

/// Entries that the join of a member writes: the member and an assignment.
const ENTRIES_PER_JOIN: usize = 2;

/// Session of the members, longer than the measurement: they send one heartbeat.
const SESSION: Duration = Duration::from_secs(600);

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("memory");
    plan.create_topic(&topic).await?;
    let client = plan.client()?;
    let groups = plan.args.empty_groups;
    let joining = plan.args.groups.min(groups);
    let joined = joining * plan.args.members;
    // Everything that grows once has grown before, also the log's buffer of entries.
    let warm = groups.div_ceil(10);
    for _ in 0..groups.max(joined * ENTRIES_PER_JOIN).div_ceil(warm) {
        commit(plan, &client, &topic, "warm-up", warm, 0..1).await?;
    }
    rss(plan, &client, &topic).await?;
    let nodes = node_count(&client).await? as f64;
    let before = rss(plan, &client, &topic).await?;
    let mut bytes = vec![rss(plan, &client, &topic).await?];
    let control = (bytes[0] - before) / nodes;
    commit(plan, &client, &topic, "memory", groups, 0..1).await?;
    bytes.push(rss(plan, &client, &topic).await?);
    commit(plan, &client, &topic, "memory", groups, 1..plan.args.partitions).await?;
    bytes.push(rss(plan, &client, &topic).await?);
    for numbers in [0..1, 1..plan.args.members] {
        members(plan, joining, numbers, false).await?;
        bytes.push(rss(plan, &client, &topic).await?);
    }
    members(plan, joining, 0..plan.args.members, true).await?;
    delete_groups(&client, &plan.prefix()).await?;
    // The records between two measurements grow the memory, too.
    let row = |name: String, from: usize, count: usize| {
        let count = count.max(1) as f64;
        let grown = (bytes[from + 1] - bytes[from]) / nodes;
        GroupBenchRow::new(name, "bytes", vec![grown / count])
            .against("growth without groups", vec![control / count])
    };
    let more_offsets = groups * (plan.args.partitions as usize - 1);
    let name = format!("resident memory of a node per group, {groups} empty ones of one offset");
    let mut rows = vec![row(name, 0, groups)];
    if more_offsets > 0 {
        let name = format!("the same per further offset, {more_offsets} of them");
        rows.push(row(name, 1, more_offsets));
    }
    let name = format!("the same per first member of a group, {joining} without an open call");
    rows.push(row(name, 2, joining));
    if joined > joining {
        let further = joined - joining;
        let name = format!("the same per further member, {further} of them");
        rows.push(row(name, 3, further));
    }
    Ok(rows)
}

/// Commits offsets of these partitions in groups without members, which creates the groups.
pub(super) async fn commit(
    plan: &GroupBenchPlan,
    client: &Client,
    topic: &str,
    what: &str,
    groups: usize,
    partitions: Range<u32>,
) -> Result<()> {
    let offsets: Vec<CommittedOffset> = partitions
        .map(|partition| CommittedOffset {
            partition: Some(TopicPartition { topic: topic.to_owned(), partition, topic_id: 0 }),
            offset: 0,
            metadata: String::new(),
        })
        .collect();
    if offsets.is_empty() {
        return Ok(());
    }
    let commit = async |number| {
        let group = plan.group(what, number);
        client.admin().commit_group_offsets(&group, &offsets).await
    };
    let commits = stream::iter(0..groups).map(commit).buffer_unordered(CONCURRENT_GROUPS);
    commits.try_collect::<()>().await.context("commit offsets of empty groups")
}

/// Joins static members with these numbers in each group, and ends their consumers, which keeps
/// the members; or has them leave.
async fn members(
    plan: &GroupBenchPlan,
    groups: usize,
    numbers: Range<usize>,
    leaves: bool,
) -> Result<()> {
    let client = plan.client()?;
    let join = async |number: usize| {
        for member in numbers.clone() {
            let group = client.consumer_group(plan.group("memory", number));
            // No topic has this name: a partition of an ended consumer would never be released.
            let group = group.pattern(format!("{}-none*", plan.prefix()));
            let group = group.static_member(format!("member-{member}")).session_timeout(SESSION);
            let mut member = group.auto_commit(AutoCommit::Off).join();
            let until = Instant::now() + STEP_MAX;
            while !member.is_settled() {
                ensure!(Instant::now() < until, "a member does not join");
                if let Ok(event) = tokio::time::timeout(TURN, member.next_encoded()).await {
                    event.context("a member has ended")??;
                }
            }
            if leaves { member.leave().await? } else { member.close().await? }
        }
        anyhow::Ok(())
    };
    let joins = stream::iter(0..groups).map(join).buffer_unordered(CONCURRENT_GROUPS);
    joins.try_collect::<()>().await
}

/// Returns the resident memory of all nodes: the lowest of several readings, each after a rest.
async fn rss(plan: &GroupBenchPlan, client: &Client, topic: &str) -> Result<f64> {
    let mut lowest = f64::INFINITY;
    for fill in FILL_BYTES {
        reads::fill(plan, topic, fill.div_ceil(plan.args.size.max(1) as u64)).await?;
        sleep(REST).await;
        let mut bytes = 0;
        for node in client.admin().metadata(&[""]).await?.nodes {
            let status = client.admin().node_status(Some(&node.endpoint)).await?;
            ensure!(status.rss_bytes > 0, "{} does not report its memory", node.endpoint);
            bytes += status.rss_bytes;
        }
        lowest = lowest.min(bytes as f64);
    }
    Ok(lowest)
}

async fn node_count(client: &Client) -> Result<usize> {
    Ok(client.admin().metadata(&[""]).await?.nodes.len())
}
