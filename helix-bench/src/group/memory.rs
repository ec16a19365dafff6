//! Growth of the nodes' resident memory by groups, committed offsets and members.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::{AutoCommit, Client};
use helix_proto::log::v1::{CommittedOffset, TopicPartition};
use tokio::time::{Instant, sleep};

use super::row::GroupBenchRow;
use super::{CONCURRENT_GROUPS, GroupBenchPlan, STEP_MAX, TURN, delete_groups, reads};

/// Bytes of records that are appended before each measurement. They take the place of the
/// small entries that the log keeps in memory, and its buffers grow no more.
const FILL_BYTES: u64 = 64 << 20;

/// Wait until the nodes have released what calls took.
const REST: Duration = Duration::from_secs(2);

/// Session of the members, longer than the measurement: they send one heartbeat.
const SESSION: Duration = Duration::from_secs(600);

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("memory");
    plan.create_topic(&topic).await?;
    let client = plan.client()?;
    let groups = plan.args.empty_groups;
    // Everything that grows once has grown before.
    commit(plan, &client, &topic, "warm-up", groups.div_ceil(10), 0..1).await?;
    rss(plan, &client, &topic).await?;
    let nodes = node_count(&client).await? as f64;
    let before = rss(plan, &client, &topic).await?;
    let mut bytes = vec![rss(plan, &client, &topic).await?];
    let control = (bytes[0] - before) / nodes;
    commit(plan, &client, &topic, "memory", groups, 0..1).await?;
    bytes.push(rss(plan, &client, &topic).await?);
    commit(plan, &client, &topic, "memory", groups, 1..plan.args.partitions).await?;
    bytes.push(rss(plan, &client, &topic).await?);
    let joining = plan.args.groups.min(groups);
    members(plan, joining, false).await?;
    bytes.push(rss(plan, &client, &topic).await?);
    members(plan, joining, true).await?;
    delete_groups(&client, &plan.prefix()).await?;
    // The records between two measurements grow the memory, too.
    let row = |name: String, from: usize, count: usize| {
        let count = count.max(1) as f64;
        let grown = (bytes[from + 1] - bytes[from]) / nodes;
        GroupBenchRow::new(name, "bytes", vec![grown / count])
            .against("growth without groups", vec![control / count])
    };
    let more_offsets = groups * (plan.args.partitions as usize - 1);
    let joined = joining * plan.args.members;
    let name = format!("resident memory of a node per group, {groups} empty ones of one offset");
    let mut rows = vec![row(name, 0, groups)];
    if more_offsets > 0 {
        let name = format!("the same per further offset, {more_offsets} of them");
        rows.push(row(name, 1, more_offsets));
    }
    let name = format!("the same per member, {joined} of them without an open call");
    rows.push(row(name, 2, joined));
    Ok(rows)
}

/// Commits offsets of these partitions in groups without members, which creates the groups.
pub(super) async fn commit(
    plan: &GroupBenchPlan,
    client: &Client,
    topic: &str,
    what: &str,
    groups: usize,
    partitions: std::ops::Range<u32>,
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

/// Joins static members and ends their consumers, which keeps the members; or has them leave.
async fn members(plan: &GroupBenchPlan, groups: usize, leaves: bool) -> Result<()> {
    let client = plan.client()?;
    let join = async |number: usize| {
        for member in 0..plan.args.members {
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

/// Returns the resident memory of all nodes, after a rest.
async fn rss(plan: &GroupBenchPlan, client: &Client, topic: &str) -> Result<f64> {
    reads::fill(plan, topic, FILL_BYTES.div_ceil(plan.args.size.max(1) as u64)).await?;
    sleep(REST).await;
    let mut bytes = 0;
    for node in client.admin().metadata(&[""]).await?.nodes {
        let status = client.admin().node_status(Some(&node.endpoint)).await?;
        ensure!(status.rss_bytes > 0, "{} does not report its memory", node.endpoint);
        bytes += status.rss_bytes;
    }
    Ok(bytes as f64)
}

async fn node_count(client: &Client) -> Result<usize> {
    Ok(client.admin().metadata(&[""]).await?.nodes.len())
}
