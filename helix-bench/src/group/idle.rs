//! CPU of the coordinator while members send nothing but heartbeats; with one node, also that of a
//! heartbeat beside a call without work.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::{AutoCommit, Client, Connection, GroupConsumer};
use helix_proto::log::v1::WhoAmIRequest;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval_at, sleep};

use super::plan::{CONCURRENT_GROUPS, GroupBenchPlan, settle};
use super::row::GroupBenchRow;

/// Heartbeats of each member in a measurement: a member that got no response would be removed.
const HEARTBEATS: u32 = 4;

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("idle");
    plan.create_topic(&topic).await?;
    let client = plan.client()?;
    let without = node_shares(plan, &client).await?;
    let groups = stream::iter(0..plan.args.groups).map(|number| join(plan, &topic, number));
    let groups = groups.buffer_unordered(CONCURRENT_GROUPS);
    let count = plan.args.groups * plan.args.members;
    let joined: Vec<(Client, Vec<GroupConsumer>)> =
        groups.try_collect().await.with_context(|| {
            format!("join {count} members; 10,000 need nodes with --memory-limit 3GiB")
        })?;
    let (connections, mut members): (Vec<_>, Vec<_>) = joined.into_iter().unzip();
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
    // The calls go to one node, while several may coordinate the groups.
    if without.len() > 1 {
        return Ok(rows);
    }
    sleep(plan.args.heartbeat).await;
    let mut calls = Vec::with_capacity(plan.args.runs);
    for _ in 0..plan.args.runs {
        calls.push(shares_with_calls(plan, &client, &connections, &topic).await?);
    }
    let rate = count as f64 / plan.args.heartbeat.as_secs_f64();
    let name = "CPU of a heartbeat, beyond the node without members";
    rows.push(GroupBenchRow::new(name, "us", call_times(&shares, &without, rate)?).against(
        "a call without work (WhoAmI), as often and on the same connections",
        call_times(&calls, &without, rate)?,
    ));
    Ok(rows)
}

/// Joins the members of a group, with a connection of their own, and pauses their partitions.
async fn join(
    plan: &GroupBenchPlan,
    topic: &str,
    number: usize,
) -> Result<(Client, Vec<GroupConsumer>)> {
    let client = plan.client()?;
    let member = || {
        let group = client.consumer_group(plan.group("idle", number)).topics([topic]);
        // The service holds a heartbeat back for a third of it.
        let group = group.session_timeout(plan.args.heartbeat * 3);
        group.auto_commit(AutoCommit::Off).join()
    };
    let mut members: Vec<_> = (0..plan.args.members).map(|_| member()).collect();
    settle(&mut members, plan.args.partitions, true).await?;
    Ok((client, members))
}

/// Measures the nodes while each connection makes as many calls as its members sent heartbeats.
async fn shares_with_calls(
    plan: &GroupBenchPlan,
    client: &Client,
    connections: &[Client],
    topic: &str,
) -> Result<NodeShares> {
    let every = plan.args.heartbeat / u32::try_from(plan.args.members)?;
    let mut calls = JoinSet::new();
    for (number, connection) in connections.iter().enumerate() {
        let node = connection.route(topic, 0).await.context("find the leader of a partition")?;
        let offset = every.mul_f64(number as f64 / connections.len() as f64);
        calls.spawn(call_repeatedly(node.connection, Instant::now() + offset, every));
    }
    tokio::select! {
        shares = node_shares(plan, client) => shares,
        Some(ended) = calls.join_next() => {
            ended??;
            bail!("a connection has stopped its calls")
        }
    }
}

/// Makes calls that need no work of the node, until one fails.
async fn call_repeatedly(node: Connection, first: Instant, every: Duration) -> Result<()> {
    let mut ticks = interval_at(first, every);
    loop {
        ticks.tick().await;
        node.access().who_am_i(WhoAmIRequest {}).await.context("call WhoAmI")?;
    }
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

/// Returns the CPU time of a call on the busiest node, in µs by run, at this many calls a second.
fn call_times(runs: &[NodeShares], without: &NodeShares, rate: f64) -> Result<Vec<f64>> {
    let node = busiest(runs)?;
    let idle = share_of(without, node)?;
    let of_run = |run: &NodeShares| Ok((share_of(run, node)? - idle) / 100.0 / rate * 1e6);
    runs.iter().map(of_run).collect()
}

fn share_of(shares: &NodeShares, address: &str) -> Result<f64> {
    shares.get(address).copied().with_context(|| format!("{address} does not report its CPU time"))
}
