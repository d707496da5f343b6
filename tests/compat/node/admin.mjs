// Admin scenarios: topics, configs, groups.

import { inspect } from 'node:util'
import { assert, scenario, waitUntil } from './suite.mjs'

async function refused(promise, ...words) {
  try {
    await promise
  } catch (error) {
    const said = inspect(error, { depth: 8 })
    const plain = said.toLowerCase().replace(/[^a-z]/g, '')
    assert(words.some(word => plain.includes(word)), `refused otherwise: ${said.slice(0, 300)}`)
    return
  }
  throw new Error(`not refused, though ${words[0]}`)
}

scenario('admin.topics', async run => {
  const { client } = run
  const topic = await run.topic(2)
  assert((await client.partitions(topic)) === 2, 'two partitions')
  await client.addPartitions(topic, 5)
  await waitUntil(async () => (await client.partitions(topic)) === 5, 'five partitions')
  await client.createsTwice(topic, refused)
  await client.deleteTopic(topic)
  await waitUntil(async () => (await client.partitions(topic)) === 0, 'the topic is gone')
})

scenario('admin.configs', async run => {
  const { client } = run
  const topic = await run.topic(1)
  assert((await client.topicConfig(topic, 'cleanup.policy')) === 'delete', 'cleanup.policy')
  await client.setTopicConfig(topic, 'retention.ms', '3600000')
  await waitUntil(async () => (await client.topicConfig(topic, 'retention.ms')) === '3600000', 'retention.ms is altered')
  assert((await client.topicConfig(topic, 'cleanup.policy')) === 'delete', 'cleanup.policy after')
})

scenario('admin.groups', async run => {
  const { client } = run
  const topic = await run.topic(1)
  const view = run.log({ topic, partitions: 1 })
  const group = run.group()
  await run.produce(topic, 1, 1)
  const member = run.start({ name: 'c1', group, topics: [topic] })
  await view.waitCaughtUp()
  assert((await client.groups()).includes(group), 'the group is listed')
  const described = await client.describeGroup(group)
  assert(described.state === 'Stable' && described.members === 1, `${described.state}, ${described.members} members`)
  await refused(client.deleteGroup(group), 'nonempty', 'notempty')
  await member.stop()
  await waitUntil(async () => (await client.describeGroup(group)).state === 'Empty', 'it is empty')
  assert((await client.committed(group, topic, 1))[0] === 1, 'committed 1')
  await client.commit(group, topic, [0])
  assert((await client.committed(group, topic, 1))[0] === 0, 'committed 0')
  await client.deleteGroup(group)
  await waitUntil(async () => !(await client.groups()).includes(group), 'it is deleted')
  assert((await client.committed(group, topic, 1))[0] === -1, 'its offsets are gone')
})
