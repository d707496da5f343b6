//! Admin scenarios: topics, configs, groups.

use crate::member::{Callback, Options};
use crate::scenario::{Result, Run, Scenario, Stop, ensure, fail, fresh, scenario};

pub fn scenarios() -> Vec<Scenario> {
    vec![scenario("admin.topics", topics), scenario("admin.configs", configs), scenario("admin.groups", groups)]
}

fn refused(answer: Result, code: &str) -> Result {
    match answer {
        Err(Stop::Failed(said)) if said.contains(code) => Ok(()),
        other => fail(format!("not refused with {code}: {other:?}")),
    }
}

fn topics(run: &mut Run) -> Result {
    let client = &run.client;
    let topic = run.topic(2)?;
    client.add_partitions(&topic, 5)?;
    client.wait("five partitions", || Ok(client.partitions(&topic)? == 5))?;
    refused(client.create_topic(&topic, 1), "TopicAlreadyExists")?;
    client.delete_topic(&topic)?;
    client.wait("the topic is gone", || Ok(client.partitions(&topic)? == 0))
}

fn configs(run: &mut Run) -> Result {
    let client = &run.client;
    let topic = run.topic(1)?;
    let value = |name: &str| client.topic_config(&topic, name);
    ensure(value("cleanup.policy")?.as_deref() == Some("delete"), "cleanup.policy")?;
    client.set_topic_config(&topic, "retention.ms", "3600000")?;
    client.wait("retention.ms is altered", || Ok(value("retention.ms")?.as_deref() == Some("3600000")))?;
    ensure(value("cleanup.policy")?.as_deref() == Some("delete"), "cleanup.policy afterwards")
}

fn groups(run: &mut Run) -> Result {
    let topic = run.topic(1)?;
    let group = fresh("g");
    let mut view = run.log(&topic, 1, false, false)?;
    run.produce(&topic, 1, 1)?;
    let member = run.start(&Options::new("c1", &group, &[&topic], "range", Callback::Stock))?;
    view.wait_caught_up()?;
    let client = &run.client;
    ensure(client.groups()?.contains(&group), "the group is listed")?;
    let (state, members) = client.describe_group(&group)?;
    ensure(state == "Stable" && members == ["compat"], format!("{state} with {members:?}"))?;
    refused(client.delete_group(&group), "NonEmptyGroup")?;
    member.stop();
    client.wait("it is empty", || Ok(client.describe_group(&group)?.0 == "Empty"))?;
    ensure(client.committed(&group, &topic, 1)? == [1], "committed 1")?;
    client.commit(&group, &topic, &[0])?;
    ensure(client.committed(&group, &topic, 1)? == [0], "committed 0")?;
    client.delete_group(&group)?;
    client.wait("it is deleted", || Ok(!client.groups()?.contains(&group)))?;
    ensure(client.committed(&group, &topic, 1)? == [-1], "its offsets are gone")
}
