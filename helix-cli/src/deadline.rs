//! Ends a command at `--timeout`. The error says what the command waited for.

use std::future::Future;
use std::time::Duration;

use helix_client::PendingCalls;
use tokio::time::timeout;

use crate::exit::{CliError, Exit};
use crate::units;

/// Most time after the limit in which a command may still report its own error, which says more.
/// It is at most the limit itself.
const GRACE_MAX: Duration = Duration::from_millis(300);

/// Runs a command whose calls are registered in `pending`.
///
/// # Errors
/// Those of the command. After the limit, the failure of the calls in progress.
pub(crate) async fn within(
    limit: Duration,
    pending: &PendingCalls,
    command: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let mut command = std::pin::pin!(command);
    if let Ok(outcome) = timeout(limit + limit.min(GRACE_MAX), &mut command).await {
        return outcome;
    }
    let what = format!("not done after {}", units::duration(limit));
    // Before the command is dropped, which ends its calls.
    match pending.abandon() {
        Some(error) => Err(anyhow::Error::new(error).context(what)),
        None => {
            let failure = CliError::new(Exit::Unavailable, what).why("--timeout has passed");
            Err(failure.hint("helix cluster health").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use helix_client::{Client, Config, Error, NewTopic};

    use super::*;
    use crate::exit;

    #[tokio::test]
    async fn reason_of_the_call_in_progress_is_kept() {
        // Accepts connections and never responds.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let pending = PendingCalls::watched();
        let addr = silent.local_addr().unwrap().to_string();
        let client = Client::new(Config { pending: pending.clone(), ..Config::new([addr]) });
        let admin = client.unwrap().admin();
        let limit = Duration::from_millis(50);
        let topic = NewTopic::new("t", 1);
        let create =
            async { admin.create_topic(&topic).await.map(drop).map_err(anyhow::Error::from) };
        let ended = within(limit, &pending, create).await.unwrap_err();
        assert_eq!(ended.to_string(), "not done after 50ms");
        let cause = ended.downcast_ref::<Error>().unwrap();
        assert!(cause.may_have_applied, "{cause}");
        assert_eq!(exit::of(&ended), Exit::Unavailable);
        assert!(exit::may_lack_nodes(&ended), "the nodes that are needed are looked up");

        let endless = within(limit, &pending, std::future::pending()).await.unwrap_err();
        assert!(endless.downcast_ref::<CliError>().is_some());
    }
}
