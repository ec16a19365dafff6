//! `helix backup` and `helix restore`: copies topics to files while the cluster runs, and back.
//! Both use the client API: a backup reads acknowledged records, a restore appends them again.

mod batches;
pub(crate) mod create;
mod manifest;
pub(crate) mod restore;
pub(crate) mod verify;

use crate::args::{BackupArgs, BackupSubcommand, GlobalArgs};
use crate::exit::{CliError, Exit};

pub(crate) async fn run(global: &GlobalArgs, args: &BackupArgs) -> anyhow::Result<()> {
    match (&args.command, &args.create.dir) {
        (Some(BackupSubcommand::Verify { dir, topics }), _) => verify::run(global, dir, topics),
        (None, Some(dir)) => create::run(global, dir, &args.create.topics).await,
        (None, None) => {
            let failure = CliError::new(Exit::Usage, "no backup directory is given");
            Err(failure.hint("helix backup DIR").into())
        }
    }
}
