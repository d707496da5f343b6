//! Group scenarios, each once with the library's own rebalance and once with a custom one. They only let members act;
//! the checker judges the delivery log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::error::KafkaError;

use crate::journal::{Partition, View, all_of};
use crate::member::{Callback, Commit, Member, Options};
use crate::scenario::{CALLBACKS, Feed, Result, Run, Scenario, ensure, fresh, scenario, skip};

const PARTITIONS: i32 = 4;
const SETTLE: Duration = Duration::from_secs(45);
const SESSION: Duration = Duration::from_secs(6);
/// Session timeout of members that leave. It is long, so that on a slow machine a hand-over after a LeaveGroup cannot
/// be mistaken for an expired session.
const LONG_SESSION: Duration = Duration::from_secs(45);
/// Shorter than the long session timeout. A hand-over within this time was caused by a LeaveGroup, or needed no
/// rebalance.
const SOON: Duration = Duration::from_secs(30);
const COOPERATIVE: &str = "cooperative-sticky";

pub fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (callback, prefix) in CALLBACKS {
        let mut add = |name: &str, body: fn(&mut Run, Callback) -> Result| {
            all.push(scenario(format!("{prefix}{name}"), move |run| body(run, callback)));
        };
        add("range.1-2-4", |run, callback| one_two_four(run, callback, "range"));
        add("roundrobin.1-2-4", |run, callback| one_two_four(run, callback, "roundrobin"));
        add("cooperative-sticky.1-2-4", |run, callback| one_two_four(run, callback, COOPERATIVE));
        add("range.ten-runs", |run, callback| ten_runs(run, callback, "range"));
        add("cooperative-sticky.ten-runs", |run, callback| ten_runs(run, callback, COOPERATIVE));
        add("one-partition-three-consumers", one_partition_three_consumers);
        add("leave", leave);
        add("crash", crash);
        add("crash-half-open", crash_half_open);
        add("gateway-restart", |run, callback| gateway_away(run, callback, "/restart"));
        add("gateway-kill", |run, callback| gateway_away(run, callback, "/kill"));
        add("commit-resume", commit_resume);
        add("commit-in-revoke", commit_in_revoke);
        add("static-members", static_members);
        add("cooperative", cooperative);
        add("partition-added", partition_added);
        add("topic-deleted", topic_deleted);
        add("regex", regex);
        add("subscription-change", subscription_change);
        add("same-client-id", same_client_id);
        add("leave-versions", leave_versions);
    }
    all.push(scenario("groups.sticky.1-2-4", |_| skip("no eager sticky assignor")));
    all.push(scenario("groups.rolling-upgrade", |_| {
        skip("librdkafka refuses a list of eager and cooperative assignors")
    }));
    all.push(scenario("groups.connect-and-sr", |_| skip("librdkafka joins with the protocol type consumer alone")));
    all.push(scenario("groups.custom.wrong-calls", wrong_calls));
    all
}

fn members_of(
    run: &mut Run,
    names: &[&str],
    group: &str,
    topics: &[&str],
    assignor: &str,
    callback: Callback,
) -> Result<Vec<Arc<Member>>> {
    names.iter().map(|name| run.start(&Options::new(name, group, topics, assignor, callback))).collect()
}

fn stop_all(members: &[Arc<Member>]) {
    for member in members {
        member.request_stop();
    }
    for member in members {
        member.stop();
    }
}

fn one_two_four(run: &mut Run, callback: Callback, assignor: &str) -> Result {
    let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
    let mut view = run.log(&topic, PARTITIONS, assignor == COOPERATIVE, false)?;
    let feed = run.feed(&topic, PARTITIONS)?;
    let all = all_of(&topic, PARTITIONS);
    let names = ["c1", "c2", "c3", "c4"];
    let mut members = Vec::new();
    for count in [1, 2, 4] {
        members.extend(members_of(run, &names[members.len()..count], &group, &[&topic], assignor, callback)?);
        view.wait_settled(&names[..count], &all)?;
        view.wait_more(2 * all.len())?;
    }
    for member in &members[1..] {
        member.stop();
    }
    view.wait_settled(&names[..1], &all)?;
    view.wait_more(2 * all.len())?;
    feed.stop()?;
    view.wait_caught_up()?;
    members[0].stop();
    Ok(())
}

/// Runs ten groups with new names in turn, each with a topic of its own. All share one log.
fn ten_runs(run: &mut Run, callback: Callback, assignor: &str) -> Result {
    let mut view = run.log("", PARTITIONS, assignor == COOPERATIVE, false)?;
    for attempt in 0..10 {
        let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
        let names: Vec<String> = (1..=4).map(|index| format!("r{attempt}c{index}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut members = Vec::new();
        for count in [1, 2, 4] {
            members.extend(members_of(run, &names[members.len()..count], &group, &[&topic], assignor, callback)?);
            view.wait_settled(&names[..count], &all_of(&topic, PARTITIONS))?;
            run.produce(&topic, PARTITIONS, 5)?;
        }
        view.wait_caught_up()?;
        stop_all(&members);
    }
    Ok(())
}

fn one_partition_three_consumers(run: &mut Run, callback: Callback) -> Result {
    let (topic, group) = (run.topic(1)?, fresh("g"));
    let mut view = run.log(&topic, 1, false, false)?;
    let members = members_of(run, &["c1", "c2", "c3"], &group, &[&topic], "range", callback)?;
    view.wait_for("the partition has one owner", SETTLE, |view| {
        view.owned.values().map(|held| held.len()).sum::<usize>() == 1
    })?;
    for _ in 0..2 {
        run.produce(&topic, 1, 9)?;
        view.wait_caught_up()?;
    }
    stop_all(&members);
    Ok(())
}

/// A group of two members that share a topic under load. `c1` is in this process. The caller's function `second` starts
/// the other member with the options of `c2`.
struct Pair<T> {
    view: View,
    feed: Arc<Feed>,
    first: Arc<Member>,
    second: Arc<T>,
    all: Vec<Partition>,
}

fn pair<T>(
    run: &mut Run,
    callback: Callback,
    redelivery_allowed: bool,
    session: Duration,
    second: impl Fn(&mut Run, &Options) -> Result<Arc<T>>,
) -> Result<Pair<T>> {
    let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
    let mut view = run.log(&topic, PARTITIONS, false, redelivery_allowed)?;
    let feed = run.feed(&topic, PARTITIONS)?;
    let session_ms = session.as_millis() as u32;
    let member = |name| Options { session_ms, ..Options::new(name, &group, &[&topic], "range", callback) };
    let first = run.start(&member("c1"))?;
    let mut options = member("c2");
    options.commit = if redelivery_allowed { Commit::Each } else { Commit::Auto };
    let second = second(run, &options)?;
    let all = all_of(&topic, PARTITIONS);
    view.wait_settled(&["c1", "c2"], &all)?;
    view.wait_for("the second member reads", SETTLE, |view| {
        view.delivered_by.get("c2").is_some_and(|count| *count > 10)
    })?;
    Ok(Pair { view, feed, first, second, all })
}

/// The remaining member must own everything well before the leaving member's session could expire.
fn leave(run: &mut Run, callback: Callback) -> Result {
    let mut pair = pair(run, callback, false, LONG_SESSION, |run, options| run.start(options))?;
    pair.second.stop();
    pair.view.wait_settled_within(&["c1"], &pair.all, SOON)?;
    pair.view.wait_more(2 * pair.all.len())?;
    pair.feed.stop()?;
    pair.view.wait_caught_up()?;
    pair.first.stop();
    Ok(())
}

fn crash(run: &mut Run, callback: Callback) -> Result {
    let mut pair = pair(run, callback, true, SESSION, |run, options| run.spawn(options))?;
    pair.second.kill();
    pair.view.wait_settled_within(&["c1"], &pair.all, SESSION + Duration::from_secs(40))?;
    pair.feed.stop()?;
    pair.view.wait_caught_up()?;
    pair.first.stop();
    let again: usize = pair.view.delivered.values().map(|count| count - 1).sum();
    ensure(again <= 1, format!("{again} records came again, though each was committed before the next"))
}

/// A stopped process keeps its connections open. When it continues, it learns that it was expelled, and joins again.
fn crash_half_open(run: &mut Run, callback: Callback) -> Result {
    let mut pair = pair(run, callback, true, SESSION, |run, options| run.spawn(options))?;
    pair.second.freeze()?;
    pair.view.wait_settled_within(&["c1"], &pair.all, SESSION + Duration::from_secs(40))?;
    let rounds = pair.view.rounds_of("c2");
    pair.second.thaw()?;
    pair.view.wait_for("the stopped member has joined again", SETTLE, |view| view.rounds_of("c2") > rounds)?;
    pair.view.wait_settled(&["c1", "c2"], &pair.all)?;
    pair.feed.stop()?;
    pair.view.wait_caught_up()?;
    pair.second.stop()?;
    pair.first.stop();
    Ok(())
}

fn gateway_away(run: &mut Run, callback: Callback, how: &str) -> Result {
    let mut pair = pair(run, callback, true, SESSION, |run, options| run.start(options))?;
    run.control(how)?;
    pair.view.refresh();
    let produced = pair.view.produced.len() + pair.all.len();
    pair.view.wait_for("producing goes on", SETTLE, |view| view.produced.len() > produced)?;
    pair.view.wait_more(5 * pair.all.len())?;
    pair.view.wait_settled(&["c1", "c2"], &pair.all)?;
    pair.feed.stop()?;
    pair.view.wait_caught_up()?;
    stop_all(&[pair.second, pair.first]);
    Ok(())
}

fn commit_resume(run: &mut Run, callback: Callback) -> Result {
    let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
    let mut view = run.log(&topic, PARTITIONS, false, false)?;
    for name in ["first", "second", "third"] {
        run.produce(&topic, PARTITIONS, 5)?;
        let member = run.start(&Options::new(name, &group, &[&topic], "range", callback))?;
        view.wait_caught_up()?;
        member.stop();
    }
    let committed = run.client.committed(&group, &topic, PARTITIONS)?;
    ensure(committed == [15; PARTITIONS as usize], format!("committed {committed:?}"))
}

/// Only the revoke callback commits. So every hand-over without a repeated record proves that the callback has
/// committed.
fn commit_in_revoke(run: &mut Run, callback: Callback) -> Result {
    let mut view = run.log("", PARTITIONS, false, false)?;
    for assignor in ["range", COOPERATIVE] {
        let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
        let feed = run.feed(&topic, PARTITIONS)?;
        let all = all_of(&topic, PARTITIONS);
        let names = [format!("{assignor} 1"), format!("{assignor} 2")];
        let names = [names[0].as_str(), names[1].as_str()];
        let mut members = Vec::new();
        for count in [1, 2] {
            let mut options = Options::new(names[count - 1], &group, &[&topic], assignor, callback);
            options.commit = Commit::Revoke;
            members.push(run.start(&options)?);
            view.wait_settled(&names[..count], &all)?;
            view.wait_more(5 * all.len())?;
        }
        members[1].stop();
        view.wait_settled(&names[..1], &all)?;
        view.wait_more(5 * all.len())?;
        feed.stop()?;
        view.wait_caught_up()?;
        members[0].stop();
    }
    Ok(())
}

/// A restart within the session moves no partition, and the other member sees no rebalance. A second member with the
/// same instance id fences the first one.
fn static_members(run: &mut Run, callback: Callback) -> Result {
    let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
    let mut view = run.log(&topic, PARTITIONS, false, false)?;
    let all = all_of(&topic, PARTITIONS);
    let options = |name: &str, instance: &str| Options {
        instance: Some(instance.to_string()),
        session_ms: 20_000,
        ..Options::new(name, &group, &[&topic], "range", callback)
    };
    let other = run.start(&options("other", "i-1"))?;
    let mover = run.start(&options("mover", "i-2"))?;
    view.wait_settled(&["other", "mover"], &all)?;
    run.produce(&topic, PARTITIONS, 3)?;
    view.wait_caught_up()?;
    let (held, rounds) = (view.owned["mover"].clone(), view.rounds_of("other"));
    mover.stop();
    let again = run.start(&options("mover again", "i-2"))?;
    view.wait_settled_within(&["other", "mover again"], &all, Duration::from_secs(15))?;
    ensure(view.owned["mover again"] == held, "the restart moved partitions")?;
    ensure(view.rounds_of("other") == rounds, "the restart made the other member rebalance")?;
    run.produce(&topic, PARTITIONS, 3)?;
    view.wait_caught_up()?;
    // The next member with this instance id starts at the committed offsets, so wait for the last commit.
    let committed = || Ok(run.client.committed(&group, &topic, PARTITIONS)? == [6; PARTITIONS as usize]);
    run.client.wait("everything is committed", committed)?;

    again.expect_fencing();
    // The fenced member learns only later that it is fenced, so the scenario ends its ownership here.
    run.end_ownership(&again.name);
    let usurper = run.start(&options("usurper", "i-2"))?;
    view.wait_for("the first of the name is fenced", SETTLE, |_| again.fenced())?;
    view.wait_settled(&["other", "usurper"], &all)?;
    run.produce(&topic, PARTITIONS, 3)?;
    view.wait_caught_up()?;
    stop_all(&[usurper, other]);
    Ok(())
}

fn cooperative(run: &mut Run, callback: Callback) -> Result {
    let (topic, group) = (run.topic(6)?, fresh("g"));
    let mut view = run.log(&topic, 6, true, false)?;
    let feed = run.feed(&topic, 6)?;
    let names = ["c1", "c2", "c3"];
    let mut members = Vec::new();
    for count in [1, 2, 3] {
        members.push(run.start(&Options::new(names[count - 1], &group, &[&topic], COOPERATIVE, callback))?);
        view.wait_settled(&names[..count], &all_of(&topic, 6))?;
        view.wait_more(18)?;
    }
    feed.stop()?;
    view.wait_caught_up()?;
    stop_all(&members);
    Ok(())
}

fn partition_added(run: &mut Run, callback: Callback) -> Result {
    let mut view = run.log("", 4, false, false)?;
    for assignor in ["range", COOPERATIVE] {
        let (topic, group) = (run.topic(2)?, fresh("g"));
        let names = [format!("{assignor} 1"), format!("{assignor} 2")];
        let names = [names[0].as_str(), names[1].as_str()];
        let members = members_of(run, &names, &group, &[&topic], assignor, callback)?;
        view.wait_settled(&names, &all_of(&topic, 2))?;
        run.produce(&topic, 2, 5)?;
        view.wait_caught_up()?;
        run.client.add_partitions(&topic, 4)?;
        view.wait_settled(&names, &all_of(&topic, 4))?;
        run.produce(&topic, 4, 5)?;
        view.wait_caught_up()?;
        stop_all(&members);
    }
    Ok(())
}

fn topic_deleted(run: &mut Run, callback: Callback) -> Result {
    let (stays, goes, group) = (run.topic(2)?, run.topic(2)?, fresh("g"));
    let mut view = run.log(&stays, 2, false, false)?;
    let members = members_of(run, &["c1", "c2"], &group, &[&stays, &goes], "range", callback)?;
    let both = [all_of(&stays, 2), all_of(&goes, 2)].concat();
    view.wait_settled(&["c1", "c2"], &both)?;
    run.produce(&goes, 2, 5)?;
    run.produce(&stays, 2, 5)?;
    view.wait_caught_up()?;
    run.client.delete_topic(&goes)?;
    view.wait_settled(&["c1", "c2"], &all_of(&stays, 2))?;
    run.produce(&stays, 2, 5)?;
    view.wait_caught_up()?;
    stop_all(&members);
    Ok(())
}

fn regex(run: &mut Run, callback: Callback) -> Result {
    let prefix = fresh("re");
    let named = |last: &str| format!("{prefix}-{last}");
    let (first, other, second) = (named("a1"), named("c1"), named("b1"));
    run.client.create_topic(&first, 2)?;
    let mut view = run.log(&first, 2, false, false)?;
    let pattern = format!("^{prefix}-[ab].*");
    let member = run.start(&Options::new("c1", &fresh("g"), &[&pattern], "range", callback))?;
    view.wait_settled(&["c1"], &all_of(&first, 2))?;
    run.client.create_topic(&other, 2)?;
    run.client.create_topic(&second, 2)?;
    view.wait_settled(&["c1"], &[all_of(&first, 2), all_of(&second, 2)].concat())?;
    run.produce(&first, 2, 5)?;
    run.produce(&second, 2, 5)?;
    view.wait_caught_up()?;
    member.stop();
    Ok(())
}

fn subscription_change(run: &mut Run, callback: Callback) -> Result {
    let (old, new, group) = (run.topic(2)?, run.topic(2)?, fresh("g"));
    let mut view = run.log(&old, 2, false, false)?;
    let members = members_of(run, &["steady", "changing"], &group, &[&old], "range", callback)?;
    let (all_old, all_new) = (all_of(&old, 2), all_of(&new, 2));
    view.wait_settled(&["steady", "changing"], &all_old)?;
    run.produce(&old, 2, 5)?;
    view.wait_caught_up()?;
    let holds = |view: &View, member: &str, wanted: &[Partition]| {
        view.owned
            .get(member)
            .is_some_and(|held| held.len() == wanted.len() && wanted.iter().all(|one| held.contains(one)))
    };
    members[1].change_topics(&[&new]);
    view.wait_for("each has its topic", SETTLE, |view| {
        holds(view, "steady", &all_old) && holds(view, "changing", &all_new)
    })?;
    run.produce(&old, 2, 5)?;
    run.produce(&new, 2, 5)?;
    view.wait_caught_up()?;
    members[1].change_topics(&[&old, &new]);
    let shared = [all_new, all_old[1..].to_vec()].concat();
    view.wait_for("both topics are owned", SETTLE, |view| {
        let held = |member: &str| view.owned.get(member).map_or(0, |held| held.len());
        held("steady") == 1 && held("changing") == shared.len()
    })?;
    run.produce(&old, 2, 5)?;
    run.produce(&new, 2, 5)?;
    view.wait_caught_up()?;
    stop_all(&members);
    Ok(())
}

/// Starts four members at the same moment. All members of this suite share one client id.
fn same_client_id(run: &mut Run, callback: Callback) -> Result {
    let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
    let mut view = run.log(&topic, PARTITIONS, false, false)?;
    let names = ["c1", "c2", "c3", "c4"];
    let members = members_of(run, &names, &group, &[&topic], "range", callback)?;
    view.wait_settled(&names, &all_of(&topic, PARTITIONS))?;
    run.produce(&topic, PARTITIONS, 10)?;
    view.wait_caught_up()?;
    let (_, client_ids) = run.client.describe_group(&group)?;
    ensure(client_ids == ["compat"; 4], format!("described as {client_ids:?}"))?;
    stop_all(&members);
    Ok(())
}

/// If the gateway did not understand a LeaveGroup, the next member would wait for the session to expire.
fn leave_versions(run: &mut Run, callback: Callback) -> Result {
    let (topic, group) = (run.topic(1)?, fresh("g"));
    let mut view = run.log(&topic, 1, false, false)?;
    for name in ["leaves", "follows"] {
        let started = Instant::now();
        let options = Options {
            session_ms: LONG_SESSION.as_millis() as u32,
            ..Options::new(name, &group, &[&topic], "range", callback)
        };
        let member = run.start(&options)?;
        view.wait_settled(&[name], &all_of(&topic, 1))?;
        ensure(started.elapsed() < SOON, format!("{name} waited {:?}", started.elapsed()))?;
        run.produce(&topic, 1, 1)?;
        view.wait_caught_up()?;
        member.stop();
    }
    run.detail = "version 1, the only one librdkafka sends".to_string();
    Ok(())
}

/// librdkafka must refuse a callback's call that belongs to the other rebalance protocol. The callback then makes the
/// right call, and the group works.
fn wrong_calls(run: &mut Run) -> Result {
    let mut view = run.log("", PARTITIONS, false, false)?;
    for assignor in ["range", COOPERATIVE] {
        let (topic, group) = (run.topic(PARTITIONS)?, fresh("g"));
        let names = [format!("{assignor} 1"), format!("{assignor} 2")];
        let names = [names[0].as_str(), names[1].as_str()];
        let members = members_of(run, &names, &group, &[&topic], assignor, Callback::Wrong)?;
        view.wait_settled(&names, &all_of(&topic, PARTITIONS))?;
        run.produce(&topic, PARTITIONS, 5)?;
        view.wait_caught_up()?;
        stop_all(&members);
        for member in &members {
            let refused = member.refused.lock().unwrap();
            // rust-rdkafka keeps only the text of such an error, not its code. One call's text has the name of the
            // code, the other's text its description.
            let state = |error: &KafkaError| {
                let said = error.to_string();
                said.contains("_STATE") || said.contains("Erroneous state")
            };
            ensure(!refused.is_empty() && refused.iter().all(state), format!("{}: {refused:?}", member.name))?;
        }
    }
    Ok(())
}
