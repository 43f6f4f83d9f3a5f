"""Everything one asks of a minimum, on one page: noise of two scales, layers, worst case, spectrum, what comes later.

:func:`wideflat.card` measures (:mod:`~wideflat.cards.measuring`), with the effort of :mod:`~wideflat.cards.subject` and
the measures of :mod:`~wideflat.cards.measures`; a :class:`~wideflat.cards.card.Card` is what comes out.
"""
