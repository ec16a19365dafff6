//! One leader at a time among several processes, fenced by the log: `docs/recipes.md`.
//! `cargo run -p helix-client --example leader -- 127.0.0.1:9092 jobs worker-7`

use std::time::Duration;

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{
    Client, Config, FetchOptions, Position, Producer, ProducerOptions, Result, Start,
};

// doc: leader
/// The right to append under a token. Others may take it away at any time; the next append then
/// fails with `FENCED`, and nothing of it is in the log.
pub struct Lead {
    pub producer: Producer,
    /// What the leaders before have written ends here.
    pub begins_at: u64,
}

/// Waits until nobody leads, or who leads has not written for `patience`, and takes over.
/// `own` must never have been used before: the process's name and a random number, for example.
pub async fn lead(client: &Client, topic: &str, own: &str, patience: Duration) -> Result<Lead> {
    // The token of whoever leads now; at first we hope that there is none.
    let mut seen = String::new();
    loop {
        match client.admin().set_fencing_token(topic, 0, Some(&seen), own).await {
            Ok(_) => break,
            Err(error) if error.is(ErrorReason::Fenced) => {
                seen = error.fencing_token.clone().unwrap_or_default();
                if seen == own {
                    // We took over in an attempt whose answer was lost.
                    break;
                }
                wait_for_silence(client, topic, patience).await?;
            }
            // The answer was lost: the next attempt is told which token is in force.
            Err(error) if error.may_have_applied => {}
            Err(error) => return Err(error),
        }
    }
    let fencing_token = Some(own.to_owned());
    let producer = client.producer(ProducerOptions { fencing_token, ..ProducerOptions::default() });
    let end = client.admin().resolve_offsets(topic, &[0], &Position::Latest).await?;
    Ok(Lead { producer, begins_at: end[0].offset })
}

/// Returns once nothing has been written for so long. A clock decides when somebody tries to take
/// over, and only that: who leads is decided by the log.
async fn wait_for_silence(client: &Client, topic: &str, patience: Duration) -> Result<()> {
    loop {
        let end = Start::new(topic, 0, Position::Latest);
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
        return Err("ADDRESS TOPIC TOKEN".into());
    };
    let client = Client::new(Config::new([address]))?;
    let lead = lead(&client, &topic, &own, Duration::from_secs(5)).await?;
    println!("{own} leads from offset {} on", lead.begins_at);
    loop {
        // As long as there is work, and often enough for the others to see that somebody leads.
        let beat = Record { value: Some(own.clone().into()), ..Record::default() };
        lead.producer.append(&topic, 0, &[beat][..]).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
