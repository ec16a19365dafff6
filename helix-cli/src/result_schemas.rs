//! JSON Schemas of the results of all commands: the source of `--schema` and docs/cli.md.
//! A command without an entry here prints no JSON.

use anyhow::Context;
use serde_json::Value;

use crate::backup::{create, restore, verify};
use crate::commands::cluster::{
    TransferredLeader, add_shards, health, members, moves, placement, tables,
};
use crate::commands::{
    access, cert, check, config, context, debug, group, offsets, produce, quota, records, topic,
    trace, version, wal,
};
use crate::demo::measurements::DemoMeasurements;
use crate::dev::StartedCluster;
use crate::dev::control::ProcessStatus;
use crate::exit::{CliError, Exit};
use crate::output;
use crate::reason_pages::ReasonPage;
use crate::report::ErrorReport;
use crate::schema::of;

/// Returns the schema of what a command prints with `-o json`, given its words: `"topic list"`.
pub(crate) fn schema(command: &str) -> Option<Value> {
    Some(match command {
        "demo" => of::<DemoMeasurements>(),
        "dev" => of::<StartedCluster>(),
        "dev kill" | "dev restart" | "dev status" | "dev stop" => of::<Vec<ProcessStatus>>(),
        "cluster info" => of::<tables::ClusterInfo>(),
        "cluster health" => of::<health::ClusterHealth>(),
        "cluster nodes" => of::<Vec<tables::NodeRow>>(),
        "cluster shards" => of::<Vec<tables::ReplicaRow>>(),
        "cluster transfer-leader" => of::<TransferredLeader>(),
        "cluster add-node" | "cluster remove-node" | "cluster replace-node" => {
            of::<members::ChangeStatus>()
        }
        "cluster drain" | "cluster undrain" => of::<members::DrainingNode>(),
        "cluster balance" => of::<members::BalancedShards>(),
        "cluster placement" => of::<placement::PlacementStatus>(),
        "cluster cordon" | "cluster uncordon" => of::<placement::CordonedNode>(),
        "cluster set-replicas" => of::<placement::WantedReplicas>(),
        "cluster add-shards" => of::<add_shards::AddedShards>(),
        "cluster move-shard" => of::<placement::MovedReplica>(),
        "cluster pause-moves" | "cluster resume-moves" => of::<moves::PausedMoves>(),
        "cluster cancel-move" => of::<placement::MoveRow>(),
        "topic create" | "topic add-partitions" => of::<topic::TopicRow>(),
        "topic list" => of::<Vec<topic::TopicRow>>(),
        "topic describe" | "topic alter" => of::<topic::TopicDescription>(),
        "topic fence" => of::<topic::FencedPartition>(),
        "group list" => of::<Vec<group::rows::GroupRow>>(),
        "group describe" => of::<group::rows::GroupDescription>(),
        "group explain" => of::<group::explain::GroupExplanation>(),
        "group history" => of::<Vec<group::rows::OffsetChangeRow>>(),
        "group forget" => of::<Vec<group::rows::ForgottenRow>>(),
        "group seek" | "group reset" => of::<Vec<group::rows::SoughtRow>>(),
        "topic trim" => of::<Vec<topic::TrimmedPartition>>(),
        "token create" => of::<access::NewTokenRow>(),
        "token list" => of::<Vec<access::TokenRow>>(),
        "token revoke" => of::<access::RevokedTokens>(),
        "acl allow" | "acl remove" | "acl list" => of::<Vec<access::RuleRow>>(),
        "acl test" => of::<access::AccessVerdict>(),
        "quota set" | "quota remove" | "quota list" => of::<Vec<quota::QuotaRow>>(),
        "whoami" => of::<access::CallerRow>(),
        "produce" => of::<produce::summary::ProduceSummary>(),
        "consume" | "tail" => of::<records::RecordRow>(),
        "offsets" => of::<Vec<offsets::OffsetRow>>(),
        "trace append" => of::<trace::TracedAppend>(),
        "wal inspect" => of::<Vec<wal::InspectedLog>>(),
        "wal verify" => of::<wal::WalVerification>(),
        "wal repair" => of::<Vec<wal::DroppedEnd>>(),
        "backup" => of::<Vec<create::BackupRow>>(),
        "backup verify" => of::<verify::BackupVerification>(),
        "restore" => of::<Vec<restore::RestoreRow>>(),
        "check" => of::<Vec<check::CheckResult>>(),
        "cert ca" | "cert node" | "cert client" => of::<Vec<cert::CertificateFilesRow>>(),
        "config list" => of::<Vec<config::SettingRow>>(),
        "config explain" => of::<config::SettingRow>(),
        "context list" => of::<Vec<context::ContextRow>>(),
        "explain" => of::<Vec<ReasonPage>>(),
        "debug bundle" => of::<debug::BundleReport>(),
        "version" => of::<version::VersionReport>(),
        _ => return None,
    })
}

/// Prints the schema of a command's results, with that of errors under `$defs`. `path` has its
/// words: `["topic", "list"]`.
///
/// # Errors
/// Fails if the command prints no JSON.
pub(crate) fn show(path: &[&str]) -> anyhow::Result<()> {
    let command = path.join(" ");
    let Some(schema) = schema(&command) else {
        let failure = CliError::new(Exit::Usage, format!("helix {command} prints no JSON"));
        return Err(failure.hint("helix --help").into());
    };
    let mut schema = schema;
    schema["$defs"] = serde_json::json!({ "error": of::<ErrorReport>() });
    output::write(format!("{schema:#}\n").as_bytes()).context("print the schema")
}
