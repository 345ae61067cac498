"""A text of about 1,100 tokens: prose of several kinds, code, and facts that its end repeats."""

# The last 128 tokens or so repeat names and numbers from the beginning. They test whether packed tokens are found.
TEXT = """\
The river rises in the hills to the north of the town and reaches the sea after about ninety miles. For most of its \
length it is narrow and quick, but below the old mill it slows down, and small boats can go as far as the bridge. In \
1846 a company from the coast built a railway along the east bank. The line carried coal, slate and wool, and for \
thirty years it was the main reason why anybody came here. When the mines closed, the trains stopped, and the houses \
beside the station stood empty until a teacher called Margaret Ellis bought the first of them and opened a school.

She wrote letters to her brother almost every week. "You ask whether I am lonely," she said in one of them. "I have \
forty-one children to look after, two cows, a roof that leaks, and a clock that strikes eleven at noon. Where would I \
find the time?" Her brother kept everything that she sent him. Today the letters are in the county library, where a \
visitor may read them on Tuesdays and Thursdays between 10 a.m. and 4 p.m., provided that he washes his hands.

How does a clock keep time? A weight pulls on a cord, the cord turns a wheel, and the wheel would spin faster and \
faster if nothing held it back. That is the work of the pendulum: each swing lets one tooth of the wheel pass, and \
each tooth gives the pendulum a small push, so that it does not come to rest. The period depends on the length of the \
rod and hardly at all on how far it swings. A rod of about one metre takes one second from side to side. Since metal \
grows longer when it is warm, a clock loses a little in summer and gains in winter, unless its maker has found a way \
to make up for it.

To make the soup, chop two onions and a clove of garlic, and fry them slowly in butter until they are soft. Add 500 \
grams of carrots, a litre of stock, salt, pepper, and half a teaspoon of ginger. Let it boil for twenty minutes. Then \
blend it, stir in the cream, and serve it with bread. It keeps for three days in the refrigerator, and it tastes \
better on the second.

def average(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else None

The function above returns None for an empty list, because there is no average of nothing. A caller who forgets this \
will see an error later, far away from the place where the mistake was made. It is often better to raise an exception \
at once. Compare the two ways, and decide which of them you would rather explain to a colleague at three o'clock in \
the morning.

Valley Fold is a village in the north-west of the county, on the road between Carrow and the coast. It was first \
named in a charter of 1218, in which a mill, two fishponds and a wood were given to the abbey. The church of St \
Brannoc has a tower of the fifteenth century and six bells, the oldest of which was cast by Thomas Hale in 1593. Of \
the market, which was held every second Friday until 1871, only the stone cross remains.

At the census of 2011 the village had 612 inhabitants, fewer than half of the number that lived there when the quarry \
was at work. The primary school was closed in 1984, and children are taken by bus to Carrow. In recent years several \
houses have been restored by families from the city, and the inn, which had been for sale since 2006, was opened \
again by a group of neighbours. An annual race from the cross to the summit of Fold Hill and back attracts about 200 \
runners; the record of 31 minutes and 8 seconds was set by Anna Whitfield in 1998, and has not been beaten since.

The committee met on 14 March to consider three proposals. The first, to repair the old bridge, would cost 180,000 \
and take two years. The second was to build a new one half a mile upstream, where the banks are firmer. The third was \
to do nothing, which, as the treasurer remarked, is the only plan that has ever been finished on time. After a long \
discussion the members voted for the second proposal by seven votes to four. Work is expected to begin in the spring, \
once the surveyors have reported on the ground and the owners of the meadow have agreed to the price.

To sum up: the railway along the east bank was built in 1846, and carried coal, slate and wool. The teacher was called \
Margaret Ellis, and had forty-one children to look after. Valley Fold was first named in a charter of 1218; the oldest \
bell was cast by Thomas Hale in 1593. The record of 31 minutes and 8 seconds was set by Anna Whitfield in 1998. To \
repair the old bridge would cost 180,000; the members voted for a new one by seven votes to four."""
