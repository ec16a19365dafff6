//! `helix group`: list, describe, explain, history, seek, reset, forget and delete.

pub(crate) mod explain;
pub(crate) mod rows;
mod seek;
pub(crate) mod topic_lag;

use anyhow::Context;
use helix_client::Client;
use helix_proto::short_names::ShortNames;

use crate::args::{GlobalArgs, GroupSubcommand};
use crate::commands::confirm::confirm;
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::format::OutputFormat;
use crate::output::{Output, message};
use crate::units;
use explain::GroupExplanation;
use rows::{ForgottenRow, GroupDescription, GroupRow, OffsetChangeRow, SoughtRow};

pub(crate) async fn run(global: &GlobalArgs, command: &GroupSubcommand) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let output = Output { format: global.output };
    match command {
        GroupSubcommand::List => {
            let groups = client.admin().groups_with_gateways().await;
            let groups = groups.context("list groups")?;
            let verdict = all_are_listed(&client).await;
            if groups.is_empty() && verdict.is_ok() && !global.quiet {
                message!("no groups");
            }
            let rows: Vec<_> = groups.into_iter().map(GroupRow::from).collect();
            output.show_with_verdict(&rows, verdict)
        }
        GroupSubcommand::Describe { group } => {
            let found = describe(&client, group, false).await?;
            let names = names(global, found.members.iter().map(|it| it.member_id.as_str()));
            output.show(&GroupDescription::new(found, &names))
        }
        GroupSubcommand::Explain { group } => {
            let found = describe(&client, group, false).await?;
            let names = names(global, found.members.iter().map(|it| it.member_id.as_str()));
            let explained = GroupExplanation::new(&found, &names);
            output.show_as(&explained, || explained.text())
        }
        GroupSubcommand::History { group, topic } => {
            let found = describe(&client, group, true).await?;
            let is_brief = global.output == OutputFormat::Table;
            let rows = OffsetChangeRow::all(found, topic.as_deref(), is_brief);
            if rows.is_empty() && !global.quiet {
                message!("no changes of offsets");
            }
            output.show(&rows)
        }
        GroupSubcommand::Seek(args) => {
            let rows = seek::seek(&client, args).await?;
            show_sought(global, output, &args.group, args.change.dry_run, &rows)
        }
        GroupSubcommand::Reset(args) => {
            let rows = seek::reset(&client, args).await?;
            show_sought(global, output, &args.group, args.change.dry_run, &rows)
        }
        GroupSubcommand::Forget { group, topic, dry_run, yes } => {
            let rows = forget(&client, group, topic, *dry_run, *yes).await?;
            if !global.quiet {
                match (rows.is_empty(), dry_run) {
                    (true, _) => message!("{group} has no offsets in {topic}"),
                    (false, true) => message!("nothing was changed: a dry run"),
                    (false, false) => message!("{group} has forgotten {topic}"),
                }
            }
            output.show(&rows)
        }
        GroupSubcommand::Delete { group, yes } => {
            delete(&client, group, *yes).await?;
            if !global.quiet {
                message!("deleted {group}");
            }
            Ok(())
        }
    }
}

/// # Errors
/// Fails if a shard is not served: the groups that it has are not in a list.
async fn all_are_listed(client: &Client) -> anyhow::Result<()> {
    let metadata = client.admin().metadata(&[""]).await.context("look up the shards")?;
    let unserved = metadata.shards.into_iter().filter(|shard| !shard.fault.is_empty());
    let (mut shards, mut why) = (Vec::new(), Vec::new());
    for shard in unserved {
        shards.push(shard.shard_id.to_string());
        why.push(format!("shard {}: {}", shard.shard_id, shard.fault));
    }
    if shards.is_empty() {
        return Ok(());
    }
    let what = format!("the groups of shards {} are not listed", shards.join(", "));
    let failure = CliError::new(Exit::Partly, what).why(why.join("\n"));
    Err(failure.hint("helix cluster health").into())
}

async fn describe(
    client: &Client,
    group: &str,
    include_history: bool,
) -> anyhow::Result<helix_client::proto::log::v1::DescribeGroupResponse> {
    let found = client.admin().describe_group(group, include_history).await;
    found.with_context(|| format!("describe {group}"))
}

/// Returns the printed names of members: short ones in tables, whole ids elsewhere.
fn names<'a>(global: &GlobalArgs, ids: impl Iterator<Item = &'a str>) -> ShortNames {
    match global.output {
        OutputFormat::Table => ShortNames::of(ids),
        OutputFormat::Wide | OutputFormat::Json | OutputFormat::Jsonl => ShortNames::default(),
    }
}

fn show_sought(
    global: &GlobalArgs,
    output: Output,
    group: &str,
    is_dry_run: bool,
    rows: &Vec<SoughtRow>,
) -> anyhow::Result<()> {
    if !global.quiet {
        match (rows.is_empty(), is_dry_run) {
            (true, _) => message!("no offsets to change"),
            (false, true) => message!("nothing was changed: a dry run"),
            (false, false) => message!("take it back: helix group seek {group} --undo"),
        }
    }
    output.show(rows)
}

async fn forget(
    client: &Client,
    group: &str,
    topic: &str,
    is_dry_run: bool,
    yes: bool,
) -> anyhow::Result<Vec<ForgottenRow>> {
    let context = || format!("forget {topic} in {group}");
    let admin = client.admin();
    let found = admin.forget_group_topic(group, topic, true).await.with_context(context)?;
    if !is_dry_run && !found.is_empty() && !yes {
        let offsets = units::counted(found.len() as u64, "offset");
        let what = format!("this deletes {offsets} of {group} in {topic}");
        confirm("topic", topic, &what).await?;
    }
    let found = match is_dry_run {
        true => found,
        false => admin.forget_group_topic(group, topic, false).await.with_context(context)?,
    };
    Ok(found.into_iter().map(ForgottenRow::from).collect())
}

async fn delete(client: &Client, group: &str, yes: bool) -> anyhow::Result<()> {
    let context = || format!("delete {group}");
    let found = client.admin().describe_group_page(group, false, 0, "").await;
    let found = found.with_context(context)?;
    let offsets = found.partitions.iter().filter(|partition| partition.offset.is_some()).count();
    let more = if found.next_page_token.is_empty() { "" } else { "more than " };
    // No confirmation: the service refuses to delete a group with members.
    if found.members.is_empty() && offsets > 0 && !yes {
        let offsets = units::counted(offsets as u64, "offset");
        confirm("group", group, &format!("this deletes {group} with {more}{offsets}")).await?;
    }
    client.admin().delete_group(group).await.with_context(context)
}
