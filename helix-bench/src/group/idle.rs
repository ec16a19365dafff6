//! CPU of the coordinator while members send nothing but heartbeats.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::{AutoCommit, Client, GroupConsumer};
use tokio::time::{Instant, sleep};

use super::row::GroupBenchRow;
use super::{CONCURRENT_GROUPS, GroupBenchPlan, settle};

/// Heartbeats of each member in a measurement: a member that got no response would be removed.
const HEARTBEATS: u32 = 4;

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("idle");
    plan.create_topic(&topic).await?;
    let client = plan.client()?;
    let without = node_shares(plan, &client).await?;
    let groups = stream::iter(0..plan.args.groups).map(|number| join(plan, &topic, number));
    let groups = groups.buffer_unordered(CONCURRENT_GROUPS);
    let mut members: Vec<Vec<GroupConsumer>> = groups.try_collect().await.with_context(|| {
        let count = plan.args.groups * plan.args.members;
        format!("join {count} members; 10,000 need nodes with --memory-limit 3GiB")
    })?;
    // Members may have lost their sessions while others joined on a busy machine.
    let settled = stream::iter(&mut members).map(|it| settle(it, plan.args.partitions, true));
    settled.buffer_unordered(CONCURRENT_GROUPS).try_collect::<()>().await?;
    // Heartbeats spread, and those of joins end.
    sleep(plan.args.heartbeat).await;
    let mut rows = Vec::new();
    let mut shares = Vec::with_capacity(plan.args.runs);
    for _ in 0..plan.args.runs {
        shares.push(node_shares(plan, &client).await?);
    }
    let coordinator = busiest(&shares)?;
    let values = shares.iter().map(|run| share_of(run, coordinator)).collect::<Result<_>>()?;
    let before = share_of(&without, coordinator)?;
    let name = format!(
        "CPU of the coordinator, {} groups of {} members, heartbeats of {:?}",
        plan.args.groups, plan.args.members, plan.args.heartbeat
    );
    rows.push(
        GroupBenchRow::new(name, "% of a core", values)
            .against("the same node without members", vec![before; plan.args.runs]),
    );
    check(plan, &client, &members).await?;
    let members = stream::iter(members.into_iter().flatten());
    let closed = members.map(GroupConsumer::close).buffer_unordered(CONCURRENT_GROUPS);
    closed.try_collect::<()>().await?;
    Ok(rows)
}

/// Joins the members of a group, with a connection of their own, and pauses their partitions.
async fn join(plan: &GroupBenchPlan, topic: &str, number: usize) -> Result<Vec<GroupConsumer>> {
    let client = plan.client()?;
    let member = || {
        let group = client.consumer_group(plan.group("idle", number)).topics([topic]);
        // The service holds a heartbeat back for a third of it.
        let group = group.session_timeout(plan.args.heartbeat * 3);
        group.auto_commit(AutoCommit::Off).join()
    };
    let mut members: Vec<_> = (0..plan.args.members).map(|_| member()).collect();
    settle(&mut members, plan.args.partitions, true).await?;
    Ok(members)
}

/// Fails unless every member is still in its group.
async fn check(
    plan: &GroupBenchPlan,
    client: &Client,
    members: &[Vec<GroupConsumer>],
) -> Result<()> {
    let settled = members.iter().flatten().filter(|member| member.is_settled()).count();
    let count = plan.args.groups * plan.args.members;
    ensure!(settled == count, "{} of {count} members have lost their group", count - settled);
    let prefix = plan.group_prefix("idle");
    let groups = client.admin().groups().await?;
    let found: u32 = groups
        .iter()
        .filter(|group| group.group.starts_with(&prefix))
        .map(|group| group.member_count)
        .sum();
    ensure!(found as usize == count, "the groups have {found} of {count} members");
    Ok(())
}

/// Shares of a core that the nodes used, in percent, by address.
type NodeShares = BTreeMap<String, f64>;

async fn node_shares(plan: &GroupBenchPlan, client: &Client) -> Result<NodeShares> {
    let before = cpu_times(client).await?;
    let since = Instant::now();
    sleep(plan.args.duration.max(plan.args.heartbeat * HEARTBEATS)).await;
    let after = cpu_times(client).await?;
    let seconds = since.elapsed().as_secs_f64();
    let share = |(address, time): (String, Duration)| {
        let before = before.get(&address).with_context(|| format!("{address} is new"))?;
        let used = time.checked_sub(*before).with_context(|| format!("{address} restarted"))?;
        Ok((address, used.as_secs_f64() / seconds * 100.0))
    };
    after.into_iter().map(share).collect()
}

async fn cpu_times(client: &Client) -> Result<BTreeMap<String, Duration>> {
    let mut times = BTreeMap::new();
    for node in client.admin().metadata(&[""]).await?.nodes {
        let status = client.admin().node_status(Some(&node.endpoint)).await?;
        times.insert(node.endpoint, Duration::from_micros(status.cpu_time_us));
    }
    Ok(times)
}

/// Returns the node that used most; with one data shard it coordinates all groups.
fn busiest(runs: &[NodeShares]) -> Result<&str> {
    let shares = runs.iter().flatten().max_by(|(_, one), (_, other)| one.total_cmp(other));
    shares.map(|(address, _)| address.as_str()).context("no node reports its CPU time")
}

fn share_of(shares: &NodeShares, address: &str) -> Result<f64> {
    shares.get(address).copied().with_context(|| format!("{address} does not report its CPU time"))
}
