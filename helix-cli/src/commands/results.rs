//! What each command prints, by its words: the one list from which `--schema` and docs/cli.md come.
//! A command that is not in it prints no JSON.

use serde_json::Value;

use super::cluster::{Transferred, health, members, rows};
use super::{check, config, context, explain, offsets, produce, records, topic, version, wal};
use crate::backup::{create, restore, verify};
use crate::demo::figures::Figures;
use crate::dev::Running;
use crate::dev::control::Process;
use crate::schema::of;

/// Schema of what a command prints with `-o json`: `"topic list"`.
pub(crate) fn schema(command: &str) -> Option<Value> {
    Some(match command {
        "demo" => of::<Figures>(),
        "dev" => of::<Running>(),
        "dev kill" | "dev restart" | "dev status" | "dev stop" => of::<Vec<Process>>(),
        "cluster info" => of::<rows::Info>(),
        "cluster health" => of::<health::Health>(),
        "cluster nodes" => of::<Vec<rows::NodeRow>>(),
        "cluster shards" => of::<Vec<rows::ReplicaRow>>(),
        "cluster transfer-leader" => of::<Transferred>(),
        "cluster add-node" | "cluster remove-node" | "cluster replace-node" => {
            of::<members::Change>()
        }
        "cluster drain" | "cluster undrain" => of::<members::Draining>(),
        "cluster balance" => of::<members::Moved>(),
        "topic create" | "topic add-partitions" => of::<topic::Row>(),
        "topic list" => of::<Vec<topic::Row>>(),
        "topic describe" | "topic alter" => of::<topic::Description>(),
        "topic fence" => of::<topic::Fenced>(),
        "topic trim" => of::<Vec<topic::Trimmed>>(),
        "produce" => of::<produce::Summary>(),
        "consume" | "tail" => of::<records::Row>(),
        "offsets" => of::<Vec<offsets::Row>>(),
        "wal inspect" => of::<Vec<wal::Inspected>>(),
        "wal verify" => of::<wal::Verified>(),
        "wal repair" => of::<Vec<wal::DroppedEnd>>(),
        "backup" => of::<Vec<create::Row>>(),
        "backup verify" => of::<verify::Verified>(),
        "restore" => of::<Vec<restore::Row>>(),
        "check" => of::<Vec<check::Finding>>(),
        "config list" => of::<Vec<config::Row>>(),
        "config explain" => of::<config::Row>(),
        "context list" => of::<Vec<context::Row>>(),
        "explain" => of::<Vec<explain::Page>>(),
        "version" => of::<version::Versions>(),
        _ => return None,
    })
}
