// Group scenarios. They only let members act; the checker judges the delivery log.

import { allOf, partitionKey } from './journal.mjs'
import { assert, scenario, Unsupported, waitUntil } from './suite.mjs'

const PARTITIONS = 4
const SESSION_MS = 6000
// Session timeout of members that leave. It is long, so that on a slow machine a hand-over after a LeaveGroup cannot be
// mistaken for an expired session.
const LONG_SESSION_MS = 45_000
// Shorter than the long session timeout. A hand-over within this time was caused by a LeaveGroup, or needed no
// rebalance.
const SOON_MS = 30_000

for (const assignor of ['range', 'roundrobin', 'sticky', 'cooperative-sticky']) {
  scenario(`groups.${assignor}.1-2-4`, async run => {
    if (!run.adapter.assignors.includes(assignor)) throw new Unsupported(`no ${assignor} assignor`)
    const topic = await run.topic(PARTITIONS)
    const group = run.group()
    const view = run.log({ topic, partitions: PARTITIONS })
    const feed = await run.feed(topic, PARTITIONS)
    const members = []
    for (const count of [1, 2, 4]) {
      while (members.length < count) {
        members.push(run.start({ name: `c${members.length + 1}`, group, assignor, topics: [topic] }))
      }
      await view.waitSettled(members.map(member => member.name), allOf(topic, PARTITIONS))
      await view.waitMore(2 * PARTITIONS)
    }
    for (const member of members.slice(1)) await member.stop()
    await view.waitSettled(['c1'], allOf(topic, PARTITIONS))
    await view.waitMore(2 * PARTITIONS)
    await feed.stop()
    await view.waitCaughtUp()
    await members[0].stop()
  })
}

async function tenRuns(run) {
  // Runs ten groups with new names in turn, each with a topic of its own. All share one log.
  const view = run.log({ topic: '', partitions: PARTITIONS })
  for (let attempt = 0; attempt < 10; attempt += 1) {
    const topic = await run.topic(PARTITIONS)
    const group = run.group()
    const members = []
    for (const count of [1, 2, 4]) {
      while (members.length < count) {
        members.push(run.start({ name: `r${attempt}c${members.length + 1}`, group, topics: [topic] }))
      }
      await view.waitSettled(members.map(member => member.name), allOf(topic, PARTITIONS))
      await run.produce(topic, PARTITIONS, 5)
    }
    await view.waitCaughtUp()
    await Promise.all(members.map(member => member.stop()))
  }
}

// The Node clients have only this assignor. The scenarios below use it, too.
scenario('groups.roundrobin.ten-runs', tenRuns)

scenario('groups.one-partition-three-consumers', async run => {
  const topic = await run.topic(1)
  const group = run.group()
  const view = run.log({ topic, partitions: 1 })
  const members = ['c1', 'c2', 'c3'].map(name => run.start({ name, group, topics: [topic] }))
  const owners = () => [...view.owned.values()].reduce((sum, keys) => sum + keys.size, 0)
  await view.waitFor(() => owners() === 1, 'the partition has one owner')
  for (let batch = 0; batch < 2; batch += 1) {
    await run.produce(topic, 1, 9)
    await view.waitCaughtUp()
  }
  for (const member of members) await member.stop()
})

/** Starts two members that share a topic under load. If `spawned`, the second one has a process of its own. */
async function pair(run, { spawned = false, outage = false, redeliveryAllowed = false, sessionTimeoutMs } = {}) {
  const topic = await run.topic(PARTITIONS)
  const group = run.group()
  const view = run.log({ topic, partitions: PARTITIONS, redeliveryAllowed })
  const feed = await run.feed(topic, PARTITIONS, { outage })
  const first = run.start({ name: 'c1', group, topics: [topic], sessionTimeoutMs })
  const options = { name: 'c2', group, topics: [topic], sessionTimeoutMs }
  const second = spawned ? run.spawn(options) : run.start(options)
  const all = allOf(topic, PARTITIONS)
  await view.waitSettled(['c1', 'c2'], all)
  await view.waitFor(() => (view.deliveredBy.get('c2') ?? 0) > 10, 'the second member reads')
  return { view, feed, first, second, all, topic, group }
}

scenario('groups.leave', async run => {
  // The remaining member must own everything well before the leaving member's session could expire.
  const { view, feed, first, second, all } = await pair(run, { sessionTimeoutMs: LONG_SESSION_MS })
  await second.stop()
  await view.waitSettled(['c1'], all, SOON_MS)
  await view.waitMore(2 * PARTITIONS)
  await feed.stop()
  await view.waitCaughtUp()
  await first.stop()
})

scenario('groups.crash', async run => {
  const { view, feed, first, second, all } = await pair(run, { spawned: true, redeliveryAllowed: true })
  await second.kill()
  await view.waitSettled(['c1'], all, SESSION_MS + 40_000)
  await feed.stop()
  await view.waitCaughtUp()
  await first.stop()
})

scenario('groups.crash-half-open', async run => {
  // A stopped process keeps its connections open. When it continues, it learns that it was expelled, and joins again.
  const { view, feed, first, second, all } = await pair(run, { spawned: true, redeliveryAllowed: true })
  await second.freeze()
  await view.waitSettled(['c1'], all, SESSION_MS + 40_000)
  const rounds = view.rounds.get('c2')
  second.thaw()
  await view.waitFor(() => view.rounds.get('c2') > rounds, 'the stopped member has joined again')
  await view.waitSettled(['c1', 'c2'], all)
  await feed.stop()
  await view.waitCaughtUp()
  await second.stop()
  await first.stop()
})

async function gatewayAway(run, away) {
  const { view, feed, first, second, all } = await pair(run, { outage: true, redeliveryAllowed: true })
  await away()
  const produced = view.produced.size
  await view.waitFor(() => view.produced.size > produced + PARTITIONS, 'producing goes on')
  await view.waitMore(5 * PARTITIONS)
  await view.waitSettled(['c1', 'c2'], all)
  await feed.stop()
  await view.waitCaughtUp()
  await second.stop()
  await first.stop()
}

scenario('groups.gateway-restart', run => gatewayAway(run, () => run.restartGateway()))
scenario('groups.gateway-kill', run => gatewayAway(run, () => run.killGateway()))

scenario('groups.commit-resume', async run => {
  const topic = await run.topic(PARTITIONS)
  const group = run.group()
  const view = run.log({ topic, partitions: PARTITIONS })
  for (const name of ['first', 'second', 'third']) {
    await run.produce(topic, PARTITIONS, 5)
    const member = run.start({ name, group, topics: [topic] })
    await view.waitCaughtUp()
    await member.stop()
  }
  const committed = await run.client.committed(group, topic, PARTITIONS)
  assert(committed.every(offset => offset === 15), `committed ${committed}`)
})

scenario('groups.commit-in-revoke', async () => {
  throw new Unsupported('it has no revoke callback')
})

scenario('groups.static-members', async run => {
  // Kill the member and do not close it, because this client sends a LeaveGroup even for a static member.
  const topic = await run.topic(PARTITIONS)
  const group = run.group()
  const view = run.log({ topic, partitions: PARTITIONS, redeliveryAllowed: true })
  const options = (name, instanceId) => ({ name, group, topics: [topic], instanceId, sessionTimeoutMs: 20_000 })
  const all = allOf(topic, PARTITIONS)
  const other = run.start(options('other', 'i-1'))
  const mover = run.spawn(options('mover', 'i-2'))
  await view.waitSettled(['other', 'mover'], all)
  await run.produce(topic, PARTITIONS, 3)
  await view.waitCaughtUp()
  const held = [...view.owned.get('mover')].sort()
  const rounds = view.rounds.get('other')
  await mover.kill()
  const again = run.start(options('mover again', 'i-2'))
  await view.waitSettled(['other', 'mover again'], all, 15_000)
  assert(String([...view.owned.get('mover again')].sort()) === String(held), 'the restart moved partitions')
  assert(view.rounds.get('other') === rounds, 'the restart made the other member rebalance')
  await run.produce(topic, PARTITIONS, 3)
  await view.waitCaughtUp()

  // If the fenced member has a commit in flight, this client joins again and fences the other member in turn. So wait
  // until everything is committed.
  const committed = async () => (await run.client.committed(group, topic, PARTITIONS)).every(offset => offset === 6)
  await waitUntil(committed, 'everything is committed')
  again.expectsFencing()
  // The fenced member learns only later that it is fenced, so the scenario ends its ownership here.
  run.journal.ended('killed', again.name)
  const usurper = run.start(options('usurper', 'i-2'))
  await view.waitFor(() => again.fenced, 'the first of the name is fenced')
  await view.waitSettled(['other', 'usurper'], all)
  await run.produce(topic, PARTITIONS, 3)
  await view.waitCaughtUp()
  await usurper.stop()
  await other.stop()
})

scenario('groups.cooperative', async () => {
  throw new Unsupported('no cooperative assignor')
})

scenario('groups.rolling-upgrade', async () => {
  throw new Unsupported('no cooperative assignor')
})

scenario('groups.partition-added', async run => {
  const topic = await run.topic(2)
  const group = run.group()
  const view = run.log({ topic, partitions: 2 })
  const members = ['c1', 'c2'].map(name => run.start({ name, group, topics: [topic] }))
  await view.waitSettled(['c1', 'c2'], allOf(topic, 2))
  await run.produce(topic, 2, 5)
  await view.waitCaughtUp()
  await run.client.addPartitions(topic, 4)
  await view.waitSettled(['c1', 'c2'], allOf(topic, 4))
  await run.produce(topic, 4, 5)
  await view.waitCaughtUp()
  for (const member of members) await member.stop()
})

scenario('groups.topic-deleted', async run => {
  const stays = await run.topic(2, { prefix: 'stays' })
  const goes = await run.topic(2, { prefix: 'goes' })
  const group = run.group()
  const view = run.log({ topic: stays, partitions: 2 })
  const members = ['c1', 'c2'].map(name => run.start({ name, group, topics: [stays, goes] }))
  await view.waitSettled(['c1', 'c2'], [...allOf(stays, 2), ...allOf(goes, 2)])
  await run.produce(goes, 2, 5)
  await run.produce(stays, 2, 5)
  await view.waitCaughtUp()
  await run.client.deleteTopic(goes)
  await view.waitSettled(['c1', 'c2'], allOf(stays, 2))
  await run.produce(stays, 2, 5)
  await view.waitCaughtUp()
  for (const member of members) await member.stop()
})

scenario('groups.regex', async run => {
  const prefix = `re-${run.group()}`
  const first = await run.topic(2, { name: `${prefix}-a1` })
  const view = run.log({ topic: first, partitions: 2 })
  const member = run.start({ name: 'c1', group: run.group(), pattern: `^${prefix}-[ab]` })
  await view.waitSettled(['c1'], allOf(first, 2))
  const second = await run.topic(2, { name: `${prefix}-b1` })
  await view.waitSettled(['c1'], [...allOf(first, 2), ...allOf(second, 2)])
  await run.produce(second, 2, 5)
  await view.waitCaughtUp()
  await member.stop()
})

scenario('groups.subscription-change', async run => {
  const old = await run.topic(2, { prefix: 'old' })
  const fresh = await run.topic(2, { prefix: 'new' })
  const group = run.group()
  const view = run.log({ topic: old, partitions: 2 })
  const member = run.start({ name: 'changing', group, topics: [old] })
  await view.waitSettled(['changing'], allOf(old, 2))
  await run.produce(old, 2, 5)
  await view.waitCaughtUp()
  await member.changeTopics([old, fresh])
  await view.waitSettled(['changing'], [...allOf(old, 2), ...allOf(fresh, 2)])
  await run.produce(old, 2, 5)
  await run.produce(fresh, 2, 5)
  await view.waitCaughtUp()
  await member.changeTopics([fresh])
  await view.waitSettled(['changing'], allOf(fresh, 2))
  await run.produce(fresh, 2, 5)
  await view.waitCaughtUp()
  await member.stop()
})

scenario('groups.same-client-id', async run => {
  // Starts four members at the same moment. All members of a suite share one client id.
  const topic = await run.topic(PARTITIONS)
  const group = run.group()
  const view = run.log({ topic, partitions: PARTITIONS })
  const names = ['c1', 'c2', 'c3', 'c4']
  const members = names.map(name => run.start({ name, group, topics: [topic] }))
  await view.waitSettled(names, allOf(topic, PARTITIONS))
  await run.produce(topic, PARTITIONS, 10)
  await view.waitCaughtUp()
  const described = await run.client.describeGroup(group)
  assert(described.members === 4 && new Set(described.clientIds).size === 1, `${described.members} members`)
  await Promise.all(members.map(member => member.stop()))
})

scenario('groups.leave-versions', async run => {
  // If the gateway did not understand a LeaveGroup, the next member would wait for the session to expire.
  const topic = await run.topic(1)
  const group = run.group()
  const view = run.log({ topic, partitions: 1 })
  for (const name of ['leaves', 'follows']) {
    const started = Date.now()
    const member = run.start({ name, group, topics: [topic], sessionTimeoutMs: LONG_SESSION_MS })
    await view.waitSettled([name], [partitionKey(topic, 0)])
    assert(Date.now() - started < SOON_MS, `${name} waited ${Date.now() - started} ms`)
    await run.produce(topic, 1, 1)
    await view.waitCaughtUp()
    await member.stop()
  }
  run.detail = 'the one version it sends'
})

scenario('groups.connect-and-sr', async run => {
  // The gateway forwards the bytes of other protocols without parsing them: those of the protocol types of Connect and
  // Schema Registry.
  for (const [type, protocol] of [['connect', 'compatible'], ['sr', 'v0']]) {
    const metadata = Buffer.from(`\x00\x01metadata of ${type}`)
    const assignment = Buffer.from([0xff, 0xfe, 0x00, 0x61])
    const answered = await run.client.rawGroup(run.group(), type, protocol, metadata, assignment)
    assert(answered.equals(assignment), `${type}: ${answered.toString('hex')}`)
  }
})
