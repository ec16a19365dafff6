//! Elects one leader among several processes, fenced by the log: `docs/recipes.md`.
//! `cargo run -p helix-client --example leader -- 127.0.0.1:9092 jobs worker-7`

use std::time::Duration;

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{
    Client, Config, FetchOptions, Position, Producer, ProducerOptions, ReadStart, Result,
};

// doc: leader
/// The right to append under a fencing token.
///
/// Another process may take it over at any time; the next append then fails with `FENCED` and
/// stores nothing.
pub struct Leadership {
    pub producer: Producer,
    /// End of the records that earlier leaders have written.
    pub start_offset: u64,
}

/// Takes over leadership once no process leads, or the leader has not written for `patience`.
///
/// `own` is this process's token. It must never have been used before: for example the process name
/// and a random number.
pub async fn take_leadership(
    client: &Client,
    topic: &str,
    own: &str,
    patience: Duration,
) -> Result<Leadership> {
    // Token of the current leader; the first attempt expects none.
    let mut current = String::new();
    loop {
        match client.admin().set_fencing_token(topic, 0, Some(&current), own).await {
            Ok(_) => break,
            Err(error) if error.is(ErrorReason::Fenced) => {
                current = error.fencing_token.clone().unwrap_or_default();
                if current == own {
                    // An earlier attempt succeeded, but its response was lost.
                    break;
                }
                wait_for_silence(client, topic, patience).await?;
            }
            // Unknown outcome: the next attempt learns which token is in force.
            Err(error) if error.may_have_applied => {}
            Err(error) => return Err(error),
        }
    }
    let fencing_token = Some(own.to_owned());
    let producer = client.producer(ProducerOptions { fencing_token, ..ProducerOptions::default() });
    let end = client.admin().resolve_offsets(topic, &[0], &Position::Latest).await?;
    Ok(Leadership { producer, start_offset: end[0].offset })
}

/// Waits until nothing was written for `patience`.
///
/// The clock only decides when a process tries to take over; the log decides which process leads.
async fn wait_for_silence(client: &Client, topic: &str, patience: Duration) -> Result<()> {
    loop {
        let end = ReadStart::new(topic, 0, Position::Latest);
        let wait = FetchOptions { wait_max: patience, ..FetchOptions::default() };
        let read = client.consumer().fetch(&[end], &wait).await?;
        if read[0].records.is_empty() {
            return Ok(());
        }
    }
}
// doc: end

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic), Some(own)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: leader ADDRESS TOPIC TOKEN".into());
    };
    let client = Client::new(Config::new([address]))?;
    let leadership = take_leadership(&client, &topic, &own, Duration::from_secs(5)).await?;
    println!("{own} leads from offset {}", leadership.start_offset);
    loop {
        // Must write more often than the other processes' patience.
        let heartbeat = Record { value: Some(own.clone().into()), ..Record::default() };
        leadership.producer.append(&topic, 0, &[heartbeat][..]).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
